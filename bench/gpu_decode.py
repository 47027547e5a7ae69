"""Decode speed on a CUDA device of a model shaped like 30 B parameters with 3 B active, by share of experts in slots.

Writes the model first: random weights, 48 layers of 128 experts, 8 of them for each token, about 18 GB. Tokens are
sampled, so that they and the experts differ from one to the next. All experts that fit are read into slots before.
Prints one JSON object an arm: tokens a second (each round, alternating the arms where several fit), hit rate and
bytes read in decode, and the device memory that is in use beside what was planned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from expertstream import ExpertKey, open_backend
from expertstream_engine import open_model
from expertstream_engine.sampling import SamplingSettings

HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 32, 4, 128, 32768
_TILE_BLOCKS = 1 << 15


def write_model(path: Path, layers: int, experts: int, hidden: int, width: int) -> None:
    """Valid blocks of small weights; every tensor takes them from another place of one tile a type."""
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(8)
    writer.add_feed_forward_length(width)
    writer.add_expert_feed_forward_length(width)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("Q4_K", (VOCABULARY, hidden)),
        "output.weight": ("Q6_K", (VOCABULARY, hidden)),
        "output_norm.weight": ("ones", (hidden,)),
    }
    for layer in range(layers):
        prefix = f"blk.{layer}."
        shapes |= {prefix + f"{norm}_norm.weight": ("ones", (hidden,)) for norm in ("attn", "ffn")}
        shapes |= {prefix + f"attn_{norm}_norm.weight": ("ones", (HEAD_SIZE,)) for norm in ("q", "k")}
        shapes[prefix + "attn_q.weight"] = "Q4_K", (HEADS * HEAD_SIZE, hidden)
        shapes[prefix + "attn_k.weight"] = "Q4_K", (KV_HEADS * HEAD_SIZE, hidden)
        shapes[prefix + "attn_v.weight"] = "Q6_K", (KV_HEADS * HEAD_SIZE, hidden)
        shapes[prefix + "attn_output.weight"] = "Q4_K", (hidden, HEADS * HEAD_SIZE)
        shapes[prefix + "ffn_gate_inp.weight"] = "F32", (experts, hidden)
        for part in ("gate", "up"):
            shapes[prefix + f"ffn_{part}_exps.weight"] = "Q4_K", (experts, width, hidden)
        shapes[prefix + "ffn_down_exps.weight"] = "Q6_K", (experts, hidden, width)
    for name, (kind, shape) in shapes.items():
        if kind in ("ones", "F32"):
            nbytes = 4 * int(np.prod(shape))
            writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=GGMLQuantizationType.F32)
        else:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            byte_shape = (*shape[:-1], shape[-1] // block * block_bytes)
            nbytes = int(np.prod(byte_shape))
            writer.add_tensor_info(name, byte_shape, np.dtype(np.uint8), nbytes, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    random = np.random.default_rng(0)
    tiles = {kind: _tile(kind, hidden, random) for kind in ("Q4_K", "Q6_K")}
    for kind, shape in shapes.values():
        if kind == "ones":
            data = np.ones(shape, np.float32).view(np.uint8)
            file.write(data.data)
        elif kind == "F32":
            data = (random.standard_normal(shape, np.float32) * np.float32(2 / hidden**0.5)).reshape(-1).view(np.uint8)
            file.write(data.data)
        else:
            block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            left = int(np.prod(shape)) // block
            while left:
                first = int(random.integers(0, _TILE_BLOCKS // 2))
                piece = tiles[kind][first : first + min(left, _TILE_BLOCKS // 2)]
                file.write(piece.data)
                left -= len(piece)
        writer.write_padding(file, file.tell())
    writer.close()


def _tile(kind: str, hidden: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Blocks of random quants whose weights have a standard deviation of about 1 / sqrt(hidden)."""
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    tile = random.integers(0, 256, (_TILE_BLOCKS, block_bytes), np.uint8)
    deviation = hidden**-0.5

    def half(value: float) -> NDArray[np.uint8]:
        return np.array([value], np.float16).view(np.uint8)

    if kind == "Q4_K":  # 6-bit scales of 32 on average, quants of 7.5 on average that the minimums take off again
        tile[:, 0:2], tile[:, 2:4] = half(deviation / 257), half(7.5 * deviation / 257)
    else:  # quants of -32 to 31, and scales of 8 with either sign
        tile[:, 192:208] = np.where(random.integers(0, 2, (_TILE_BLOCKS, 16)), 8, 256 - 8).astype(np.uint8)
        tile[:, 208:210] = half(deviation / (8 * 18.5))
    return tile


def run(model: Any, tokens: int, seed: int) -> Any:
    """The report of one generation."""
    generation = model.generate(
        [1 + seed, 2, 3, 4], tokens, SamplingSettings(temperature=1.0, seed=seed), ignore_eos=True
    )
    for _ in generation:
        pass
    return generation.report


def measure(path: Path, share: str, options: argparse.Namespace) -> dict[str, Any]:
    backend = open_backend(options.backend)
    free_bytes = backend.describe_device().free_bytes or 0
    began = time.perf_counter()
    with open_model(path, expert_memory=share, backend=options.backend, context=1024) as model:
        opened_s = time.perf_counter() - began
        checkpoint = model.planned.checkpoint
        keys = [ExpertKey(layer.layer, e) for e in range(options.experts) for layer in checkpoint.layers]
        seeded = model.streamer.seed(dict.fromkeys(keys, 0.0))
        seeded_s = time.perf_counter() - began - opened_s
        reports = [run(model, options.tokens, seed) for seed in range(options.rounds + 1)][1:]
        if options.profile:
            _profile(lambda: run(model, options.tokens, 99))
        speeds = [report.decode_tokens_per_second for report in reports]
        needed = sum(report.decode.hits + report.decode.misses for report in reports)
        return {
            "experts_in_slots": share,
            "slots": model.streamer.slot_count,
            "tokens_per_s": statistics.median(speeds),
            "lowest": min(speeds),
            "highest": max(speeds),
            "hit_rate": sum(report.decode.hits for report in reports) / needed,
            "bytes_read_per_token": sum(report.decode.expert_bytes_read for report in reports)
            / sum(report.decode_passes for report in reports),
            "device_bytes": free_bytes - (backend.describe_device().free_bytes or 0),
            "planned_bytes": model.planned.plan.total_bytes,
            "open_s": opened_s,
            "seeded": seeded,
            "seed_s": seeded_s,
        }


def _profile(work: Any) -> None:
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.runcall(work)
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="where the model is, or will be written")
    parser.add_argument("--backend", default="cuda_discrete")
    parser.add_argument("--shares", nargs="+", default=["all", "50%", "25%"])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="and where the host's time goes, after the rounds")
    options = parser.parse_args()
    if not options.model.exists():
        began = time.perf_counter()
        write_model(options.model, options.layers, options.experts, options.hidden, options.width)
        size_gb = options.model.stat().st_size / 1e9
        print(json.dumps({"written_gb": size_gb, "seconds": time.perf_counter() - began}), flush=True)
    for share in options.shares:
        print(json.dumps(measure(options.model, share, options)), flush=True)


if __name__ == "__main__":
    main()
