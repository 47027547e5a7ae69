"""Model files for tests: random ones that references exist for, and dequantized copies."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import gguf
import numpy as np

from expertstream import open_checkpoint
from expertstream_engine import BUNDLED_MODEL

DATA = Path(__file__).parent / "data"
TINY_Q8_0 = DATA / "tiny15m-q8_0.gguf"

_BYTE_LEVEL_SPECIALS = ("<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
# fmt: off
_MERGES = ["t h", "th e", "a n", "i n", "e r", "Ġ a", "Ġ t", "Ġt h", "Ġth e", "o n", "r e", "Ġ s", "e n", "o u", "e s",
           "o r"]
# fmt: on
_HIDDEN, _HEADS, _HEAD_SIZE, _EXPERTS, _VOCABULARY, _WIDTH = 256, 4, 64, 8, 320, 256
_RANDOM = {  # kv heads, rope base, norm epsilon, pre-tokenizer, sizes of the norms of query and key
    "qwen3moe": (2, 1e6, 1e-6, "qwen2", (64, 64)),
    "olmoe": (4, 1e4, 1e-5, "olmo", (256, 256)),
    "llama": (2, 1e6, 1e-5, "llama-bpe", None),
}


def write_random(architecture: str, path: Path) -> Path:
    """A two-layer F32 model with the weights that `data/reference/random-<architecture>-f32.json` was made with."""
    kv_heads, rope_base, epsilon, pre, norms = _RANDOM[architecture]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(1024)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(2)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_rope_freq_base(rope_base)
    writer.add_expert_count(_EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_feed_forward_length(_WIDTH)
    if architecture == "qwen3moe":
        writer.add_key_length(_HEAD_SIZE)
        writer.add_value_length(_HEAD_SIZE)
        writer.add_expert_feed_forward_length(_WIDTH)
    _add_tokenizer(writer, pre)
    random = np.random.default_rng(0)
    for name, (shape, deviation) in _random_shapes(kv_heads, norms).items():
        values = random.standard_normal(shape, dtype=np.float32)
        values = 1 + 0.1 * values if deviation is None else values * np.float32(deviation)
        writer.add_tensor(name, values.astype(np.float32))
    return _finish(writer, path)


def write_damaged(path: Path, part_name: str, value: float, source: Path = BUNDLED_MODEL) -> Path:
    """A copy of a model with `value` in the last row of a tensor, as its first number or its first block's scale.

    `part_name` is the name of a resident tensor, or of a part of the experts in block 1, all of which have it then.
    """
    shutil.copyfile(source, path)
    checkpoint = open_checkpoint(path)
    if part_name in checkpoint.tensors:
        tensor = checkpoint.tensors[part_name]
        type_name, rows, nbytes, begins = tensor.type_name, math.prod(tensor.shape[:-1]), tensor.nbytes, [tensor.offset]
    else:
        (part,) = (part for part in checkpoint.layers[1].parts if part.name == part_name)
        type_name, rows, nbytes, begins = part.type_name, part.shape[0], part.expert_bytes, part.offsets.tolist()
    scale_at = {"F32": 0, "Q4_K": 0, "Q6_K": 208, "Q8_0": 0}[type_name]
    written = np.full(1, value, np.float32 if type_name == "F32" else np.float16).tobytes()
    with path.open("r+b") as file:
        for begin in begins:
            file.seek(begin + nbytes // rows * (rows - 1) + scale_at)
            file.write(written)
    return path


DAMAGED_PARTS = [
    "token_embd.weight",
    "output_norm.weight",
    *(f"blk.1.{name}.weight" for name in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")),
    *(f"blk.1.{name}.weight" for name in ("attn_q_norm", "attn_k_norm", "ffn_norm", "ffn_gate_inp")),
    "gate",
    "up",
    "down",
]
"""What `write_damaged` takes, one of each kind."""


def write_dequantized(source: Path, path: Path) -> Path:
    """A copy of a GGUF file with every tensor in F32."""
    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(path), reader.fields["general.architecture"].contents())
    for name, key in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            element = key.types[1] if key.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, key.contents(), key.types[0], element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    return _finish(writer, path)


def _random_shapes(kv_heads: int, norms: tuple[int, int] | None) -> dict[str, tuple[tuple[int, ...], float | None]]:
    """Name to shape and standard deviation, None for a norm, in the order in which the numbers are drawn."""
    query, kv = _HEADS * _HEAD_SIZE, kv_heads * _HEAD_SIZE
    shapes: dict[str, tuple[tuple[int, ...], float | None]] = {
        "token_embd.weight": ((_VOCABULARY, _HIDDEN), 1.0),
        "output_norm.weight": ((_HIDDEN,), None),
        "output.weight": ((_VOCABULARY, _HIDDEN), 4.0 / _HIDDEN**0.5),
    }
    for block in range(2):
        prefix = f"blk.{block}."
        shapes[prefix + "attn_norm.weight"] = ((_HIDDEN,), None)
        for name, rows in (("q", query), ("k", kv), ("v", kv)):
            shapes[f"{prefix}attn_{name}.weight"] = ((rows, _HIDDEN), _HIDDEN**-0.5)
        shapes[prefix + "attn_output.weight"] = ((_HIDDEN, query), query**-0.5)
        if norms:
            shapes[prefix + "attn_q_norm.weight"] = ((norms[0],), None)
            shapes[prefix + "attn_k_norm.weight"] = ((norms[1],), None)
        shapes[prefix + "ffn_norm.weight"] = ((_HIDDEN,), None)
        shapes[prefix + "ffn_gate_inp.weight"] = ((_EXPERTS, _HIDDEN), 2.0 / _HIDDEN**0.5)
        shapes[prefix + "ffn_gate_exps.weight"] = ((_EXPERTS, _WIDTH, _HIDDEN), _HIDDEN**-0.5)
        shapes[prefix + "ffn_up_exps.weight"] = ((_EXPERTS, _WIDTH, _HIDDEN), _HIDDEN**-0.5)
        shapes[prefix + "ffn_down_exps.weight"] = ((_EXPERTS, _HIDDEN, _WIDTH), _WIDTH**-0.5)
    return shapes


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    """All bytes, a few merges, special tokens, and unused ones up to the vocabulary's size."""
    letters = _byte_letters()
    tokens = [letters[byte] for byte in range(256)] + [merge.replace(" ", "") for merge in _MERGES]
    specials = range(len(tokens), len(tokens) + len(_BYTE_LEVEL_SPECIALS))
    types = [1] * len(tokens) + [3] * len(specials)
    tokens += _BYTE_LEVEL_SPECIALS
    types += [5] * (_VOCABULARY - len(tokens))
    tokens += [f"<unused{number}>" for number in range(len(tokens), _VOCABULARY)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(specials[0])
    writer.add_eos_token_id(specials[1])
    writer.add_add_bos_token(False)


def _byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + number) for number, byte in enumerate(others)}


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_sparse(path: Path, *, blocks: int = 8, experts: int = 64, width: int = 1024, hidden: int = 2048) -> Path:
    """A qwen3moe file of Q4_K experts and Q8_0 attention, most of it a hole of zeros: large, and written at once."""
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(blocks)
    writer.add_head_count(16)
    writer.add_head_count_kv(4)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(8)
    writer.add_feed_forward_length(width)
    writer.add_expert_feed_forward_length(width)
    _add_tokenizer(writer, "qwen2")
    matrices, vectors = {"token_embd.weight": (_VOCABULARY, hidden)}, {"output_norm.weight": hidden}
    for block in range(blocks):
        prefix = f"blk.{block}."
        vectors |= {prefix + "attn_norm.weight": hidden, prefix + "ffn_norm.weight": hidden}
        vectors |= {prefix + "attn_q_norm.weight": 128, prefix + "attn_k_norm.weight": 128}
        matrices |= {prefix + "attn_q.weight": (16 * 128, hidden), prefix + "attn_output.weight": (hidden, 16 * 128)}
        matrices |= {prefix + "attn_k.weight": (4 * 128, hidden), prefix + "attn_v.weight": (4 * 128, hidden)}
        matrices |= {prefix + f"ffn_{part}_exps.weight": (experts, width, hidden) for part in ("gate", "up")}
        matrices[prefix + "ffn_down_exps.weight"] = (experts, hidden, width)
        matrices[prefix + "ffn_gate_inp.weight"] = (experts, hidden)
    random = np.random.default_rng(0)
    written: dict[int, bytes] = {}  # what makes tokens choose different experts
    end = 0
    for name, size in vectors.items():
        writer.add_tensor_info(name, (size,), np.dtype(np.float32), size * 4, raw_dtype=gguf.GGMLQuantizationType.F32)
        written[end] = np.ones(size, np.float32).tobytes()
        end += -(-size * 4 // 32) * 32
    for name, shape in matrices.items():
        kind = gguf.GGMLQuantizationType.Q4_K if "_exps" in name else gguf.GGMLQuantizationType.Q8_0
        kind = gguf.GGMLQuantizationType.F32 if "gate_inp" in name else kind
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        byte_shape = (*shape[:-1], shape[-1] // block_size * block_bytes)
        size_bytes = int(np.prod(byte_shape))
        is_float = kind == gguf.GGMLQuantizationType.F32
        element = np.dtype(np.float32 if is_float else np.uint8)
        writer.add_tensor_info(name, shape if is_float else byte_shape, element, size_bytes, raw_dtype=kind)
        if "gate_inp" in name or name == "token_embd.weight":
            written[end] = gguf.quants.quantize(random.standard_normal(shape, dtype=np.float32), kind).tobytes()
        end += -(-size_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    with writer.fout[0] as file:
        data_start = -(-file.tell() // 32) * 32
        file.truncate(data_start + end)
        for offset, data in written.items():
            file.seek(data_start + offset)
            file.write(data)
    return path
