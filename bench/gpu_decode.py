"""Decode speed on a CUDA device of a model shaped like 30 B parameters with 3 B active, by where its experts are.

Writes the model first: random weights, 48 layers of 128 experts, 8 of them for each token, about 19 GB. Tokens are
sampled, so that they and the experts differ from one to the next; how much they differ is decided by the scale of the
embedding, without which the experts of a random model hardly change. Every expert has been through the slots before,
so what the host tier can hold it holds. Prints one JSON object an arm: tokens a second of each round, hit rates, bytes
read and copied, where a token's time goes, and the device memory that is in use beside what was planned.

An arm is SLOTS/HOST or SLOTS/HOST/KIND, as --expert-memory, --host-memory and --host-tier take them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from expertstream import Counters, open_backend
from expertstream_engine import open_model
from expertstream_engine.sampling import SamplingSettings

HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, CONTEXT = 32, 4, 128, 32768, 2048
_TILE_BLOCKS = 1 << 15


def write_model(path: Path, layers: int, experts: int, hidden: int, width: int, embedding_scale: float) -> None:
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
        "token_embd.weight": ("embedding", (VOCABULARY, hidden)),
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
            kind = _TYPES[kind]
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
    scales = {"Q4_K": 1.0, "Q6_K": 1.0, "embedding": embedding_scale}
    tiles = {kind: _tile(_TYPES[kind], hidden**-0.5 * scale, random) for kind, scale in scales.items()}
    for kind, shape in shapes.values():
        if kind == "ones":
            data = np.ones(shape, np.float32).view(np.uint8)
            file.write(data.data)
        elif kind == "F32":
            data = (random.standard_normal(shape, np.float32) * np.float32(2 / hidden**0.5)).reshape(-1).view(np.uint8)
            file.write(data.data)
        else:
            block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[_TYPES[kind]]]
            left = int(np.prod(shape)) // block
            while left:
                first = int(random.integers(0, _TILE_BLOCKS // 2))
                piece = tiles[kind][first : first + min(left, _TILE_BLOCKS // 2)]
                file.write(piece.data)
                left -= len(piece)
        writer.write_padding(file, file.tell())
    writer.close()


_TYPES = {"Q4_K": "Q4_K", "Q6_K": "Q6_K", "embedding": "Q4_K"}


def _tile(kind: str, deviation: float, random: np.random.Generator) -> NDArray[np.uint8]:
    """Blocks of random quants whose weights have about that standard deviation."""
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    tile = random.integers(0, 256, (_TILE_BLOCKS, block_bytes), np.uint8)

    def half(value: float) -> NDArray[np.uint8]:
        return np.array([value], np.float16).view(np.uint8)

    if kind == "Q4_K":  # 6-bit scales of 32 on average, quants of 7.5 on average that the minimums take off again
        tile[:, 0:2], tile[:, 2:4] = half(deviation / 257), half(7.5 * deviation / 257)
    else:  # quants of -32 to 31, and scales of 8 with either sign
        tile[:, 192:208] = np.where(random.integers(0, 2, (_TILE_BLOCKS, 16)), 8, 256 - 8).astype(np.uint8)
        tile[:, 208:210] = half(deviation / (8 * 18.5))
    return tile


def run(model: Any, tokens: int, seed: int, prompt_tokens: int = 4) -> Any:
    """The report of one generation."""
    prompt = np.random.default_rng(seed).integers(1, VOCABULARY, prompt_tokens).tolist()
    generation = model.generate(prompt, tokens, SamplingSettings(temperature=1.0, seed=seed), ignore_eos=True)
    for _ in generation:
        pass
    return generation.report


def measure(path: Path, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    share, host, *kind = arm.split("/")
    chosen: dict[str, Any] = {"expert_memory": share}
    if options.backend == "cuda_discrete":
        chosen |= {"host_memory": host, **({"host_tier": kind[0]} if kind else {})}
    backend = open_backend(options.backend)
    free_bytes = backend.describe_device().free_bytes or 0
    began = time.perf_counter()
    with open_model(path, backend=options.backend, context=CONTEXT, **chosen) as model:
        opened_s = time.perf_counter() - began
        model.wait_for_host_tier()
        tier_s = time.perf_counter() - began - opened_s
        for layer in model.planned.checkpoint.layers:
            every = np.arange(layer.expert_count)
            for lease in model.streamer.rounds(layer.layer, every, np.ones_like(every)):
                lease.release()
        touched_s = time.perf_counter() - began - opened_s - tier_s
        longest = run(model, options.tokens, 0, CONTEXT - options.tokens)  # so that all planned memory is in use
        reports = [run(model, options.tokens, seed) for seed in range(1, options.rounds + 1)]
        if options.profile:
            _profile(lambda: run(model, options.tokens, 99))
        speeds = [report.decode_tokens_per_second for report in reports]
        total = reduce(add, (report.decode for report in reports))
        passes = sum(report.decode_passes for report in reports)
        token_ms = 1e3 * sum(report.decode_seconds for report in reports) / passes
        split = _split(model, total, passes, token_ms) if options.backend == "cuda_discrete" else None
        plan, last = model.planned.plan, reports[-1]
        return {
            "arm": arm,
            "slots": last.slots,
            "host_slots": last.host_slots,
            "host_tiering": last.host_tiering,
            "tokens_per_s": statistics.median(speeds),
            "lowest": min(speeds),
            "highest": max(speeds),
            "hit_rate": total.hits / (total.hits + total.misses),
            "host_hit_rate": total.host_hits / total.misses if total.misses else None,
            "mb_read_per_token": total.expert_bytes_read / passes / 1e6,
            "mb_h2d_per_token": total.h2d_bytes / passes / 1e6,
            "mb_d2h_per_token": total.d2h_bytes / passes / 1e6,
            "prefill_tokens_per_s": len(longest.prompt_tokens) / longest.prefill_seconds,
            "ms_per_token": token_ms,
            "ms_split": split,
            "free_memory_taken_gb": (free_bytes - (backend.describe_device().free_bytes or 0)) / 1e9,
            "device_gb": last.device_bytes / 1e9,
            "planned_device_gb": plan.device_bytes / 1e9,
            "pinned_gb": last.pinned_bytes / 1e9,
            "open_s": opened_s,
            "tier_s": tier_s,
            "touched_s": touched_s,
        }


def _split(model: Any, total: Counters, passes: int, token_ms: float) -> dict[str, float]:
    """Where a token's milliseconds go.

    "kernels": its graphs launched one after the other without a wait between; where experts were missing, those of a
    token with none. "disk": the host stands still for reads. "copies": what the bytes copied both ways take at the
    speed of one plain copy measured now; nothing is loaded ahead, so a layer's kernels stand still for its copies, save
    those that run while others are read. "host": what is left, the host's own work and its meetings with the device.
    """
    kernels_ms = _kernels_ms(model)
    disk_ms = 1e3 * total.disk_wait_s / passes
    copies_ms = 1e3 * (total.h2d_bytes + total.d2h_bytes) / passes / _copy_bytes_per_s()
    return {
        "kernels": kernels_ms,
        "disk": disk_ms,
        "copies": copies_ms,
        "host": token_ms - kernels_ms - disk_ms - copies_ms,
    }


def _kernels_ms(model: Any) -> float:
    import cupy

    opened = model._decoder._ops._opened
    graphs = {key: recording.graph for key, recording in opened.recordings.items() if recording.graph is not None}
    attend = [graph for key, graph in graphs.items() if isinstance(key, tuple) and key[0] == "attend"]
    routed = next(graph for key, graph in graphs.items() if isinstance(key, tuple) and key[0] == "routed token")
    last = next(graph for key, graph in graphs.items() if isinstance(key, tuple) and key[0] == "logits")

    def token() -> float:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(opened.stream)
        for graph in attend:
            graph.launch(opened.stream)
            routed.launch(opened.stream)
        last.launch(opened.stream)
        end.record(opened.stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end))

    return statistics.median(token() for _ in range(20))


def _copy_bytes_per_s() -> float:
    import cupy

    size_bytes = 4 << 20  # about a slot
    host, device = cupy.cuda.alloc_pinned_memory(size_bytes), cupy.empty(size_bytes, cupy.uint8)
    stream, begin, end = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.cuda.Event()
    begin.record(stream)
    for _ in range(100):
        device.data.copy_from_host_async(host.ptr, size_bytes, stream)
    end.record(stream)
    end.synchronize()
    return float(100 * size_bytes / cupy.cuda.get_elapsed_time(begin, end) * 1e3)


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
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["all/0", "50%/all", "25%/all", "25%/50%/exclusive", "25%/50%/inclusive", "25%/0"],
    )
    parser.add_argument("--embedding-scale", type=float, default=45.0, help="larger: more various experts")
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
        write_model(
            options.model, options.layers, options.experts, options.hidden, options.width, options.embedding_scale
        )
        size_gb = options.model.stat().st_size / 1e9
        print(json.dumps({"written_gb": size_gb, "seconds": time.perf_counter() - began}), flush=True)
    for arm in options.arms:
        print(json.dumps(measure(options.model, arm, options)), flush=True)


if __name__ == "__main__":
    main()
