"""Decode speed on a CUDA device of a model shaped like 30 B parameters with 3 B active, by where its experts are.

usage: python bench/gpu_decode.py MODEL [--arms ARM ...] [--rounds 5] [--tokens 64] [--limit-s SECONDS]

Writes the model first: random weights, 48 layers of 128 experts, 8 of them for each token, about 19 GB. Tokens are
sampled, so that they and the experts differ from one to the next; how much they differ is decided by the scale of the
embedding, without which the experts of a random model hardly change.

An arm is [BACKEND:]SLOTS[/HOST[/KIND]], as --backend, --expert-memory, --host-memory and --host-tier take them. All of
them are open at once, for which there must be memory: what they take is said, and too much is refused before anything
is loaded. Each is warmed when it is opened: every expert goes through the slots, so that what the host tier can hold it
holds, and a long prompt is read, so that all planned memory is in use. Then they take turns, each of them once a round.

Prints JSON: a line of versions, one of the memory, one of the storage's own speed, which bounds the arms that read from
it, one line an arm, and the storage's speed again. Of an arm: tokens a second (median, lowest and highest round), hit
rates, bytes read and copied over all rounds, where a token's time goes (each part [median, lowest, highest]), and the
device memory that is in use beside what was planned. What each turn gave goes to stderr at once.

Reads of host memory across the bus: --arms cuda_unified:all --backend-option cuda_unified.mapped=true
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from attrs import define, field, frozen
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from versions import versions

from expertstream import ConfigError, ExpertstreamError, available_memory, load_settings
from expertstream_engine import GenerationReport, Model, RunSettings, SamplingSettings
from expertstream_engine.demand import PlannedRun, plan_run

HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 32, 4, 128, 32768
ARMS = ["all/0", "50%/all", "25%/all", "25%/50%/exclusive", "25%/50%/inclusive", "50%/0", "25%/0"]
PIECE_BYTES = 4 << 20
BEGAN = time.perf_counter()
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
    file.flush()
    os.fsync(file.fileno())  # or what is read next would share the drive with it
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


@frozen
class Arm:
    """Where the experts are, as it was asked for."""

    name: str
    backend: str
    settings: RunSettings

    @classmethod
    def of(cls, name: str, backend: str, backend_options: Iterable[str], context: int) -> Arm:
        """Raises ConfigError."""
        named, _, memory = name.rpartition(":")
        backend = named or backend
        share, *tier = memory.split("/")
        if len(tier) > 2:
            raise ConfigError(f"arm {name!r} is not [BACKEND:]SLOTS[/HOST[/KIND]]")
        overrides = {
            "backend": backend,
            "backends": [option for option in backend_options if option.startswith(f"{backend}.")],
            "context": context,
            "expert_memory": share,
            **dict(zip(("host_memory", "host_tier"), tier, strict=False)),
        }
        return cls(name, backend, load_settings(RunSettings, file=None, environ={}, overrides=overrides))

    def planned(self, model: Path) -> PlannedRun:
        """Its plan, made while no arm is open. Ends the program where it is refused."""
        try:
            return plan_run(model, self.settings)
        except ExpertstreamError as error:
            sys.exit(f"arm {self.name}: {error}")


@define
class OpenArm:
    """An arm that is loaded and warm, with what its turns gave so far."""

    arm: Arm
    model: Model
    opened_s: float
    tier_s: float
    touched_s: float
    taken_bytes: int
    longest: GenerationReport
    reports: list[GenerationReport] = field(factory=list)
    splits: list[dict[str, float]] = field(factory=list)

    @classmethod
    def opened(cls, arm: Arm, planned: PlannedRun, stack: ExitStack, tokens: int) -> OpenArm:
        """Loaded, and every expert and a prompt that fills the context gone through it."""
        free_bytes = planned.backend.describe_device().free_bytes or 0
        began = time.perf_counter()
        model = stack.enter_context(Model(planned, arm.settings))
        opened_s = time.perf_counter() - began
        model.wait_for_host_tier()
        tier_s = time.perf_counter() - began - opened_s
        for layer in planned.checkpoint.layers:
            every = np.arange(layer.expert_count)
            for lease in model.streamer.rounds(layer.layer, every, np.ones_like(every)):
                lease.release()
        touched_s = time.perf_counter() - began - opened_s - tier_s
        longest = generated(model, tokens, 0, model.context_tokens - tokens)
        taken_bytes = free_bytes - (planned.backend.describe_device().free_bytes or 0)
        told(f"{arm.name} is open and warm after {time.perf_counter() - began:.1f} s")
        return cls(arm, model, opened_s, tier_s, touched_s, taken_bytes, longest)

    def take_turn(self, number: int, tokens: int) -> None:
        """A text of its own for each round, the same for every arm."""
        report = generated(self.model, tokens, number)
        self.reports.append(report)
        self.splits.append(_split(self.model, report))
        told(f"round {number}, {self.arm.name}: {report.decode_tokens_per_second:.1f} tokens/s")

    def figures(self) -> dict[str, Any]:
        """What is printed of it."""
        speeds = [report.decode_passes / report.decode_seconds for report in self.reports]
        total = reduce(add, (report.decode for report in self.reports))
        passes = sum(report.decode_passes for report in self.reports)
        last = self.reports[-1]
        return {
            "arm": self.arm.name,
            "backend": last.backend,
            "io_mode": last.io_mode,
            "rounds": len(self.reports),
            "slots": last.slots,
            "host_slots": last.host_slots,
            "host_tiering": last.host_tiering,
            "tokens_per_s": statistics.median(speeds),
            "lowest": min(speeds),
            "highest": max(speeds),
            "hit_rate": total.hit_rate,
            "host_hit_rate": total.host_hits / total.misses if total.misses else None,
            "mb_read_per_token": total.expert_bytes_read / passes / 1e6,
            "mb_h2d_per_token": total.h2d_bytes / passes / 1e6,
            "mb_d2h_per_token": total.d2h_bytes / passes / 1e6,
            "prefill_tokens_per_s": len(self.longest.prompt_tokens) / self.longest.prefill_seconds,
            "ms_per_token": _spread([1e3 / speed for speed in speeds]),
            "ms_split": {part: _spread([split[part] for split in self.splits]) for part in self.splits[0]},
            "free_memory_taken_gb": self.taken_bytes / 1e9,
            "device_gb": last.device_bytes / 1e9,
            "planned_device_gb": last.planned_device_bytes / 1e9,
            "pinned_gb": last.pinned_bytes / 1e9,
            "open_s": self.opened_s,
            "tier_s": self.tier_s,
            "touched_s": self.touched_s,
        }


def generated(model: Model, tokens: int, seed: int, prompt_tokens: int = 4) -> GenerationReport:
    """The report of one generation."""
    prompt = np.random.default_rng(seed).integers(1, VOCABULARY, prompt_tokens).tolist()
    generation = model.generate(prompt, tokens, SamplingSettings(temperature=1.0, seed=seed), ignore_eos=True)
    for _ in generation:
        pass
    return generation.report


def take_turns(arms: Sequence[OpenArm], rounds: int, tokens: int, limit_s: float | None) -> None:
    """Round after round, in each of which every arm has its turn. Another one begins if it should end within the limit.

    The limit counts from the start of the program, and a round is expected to take as long as the longest so far.
    """
    longest_s = 0.0
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        if number > 1 and limit_s is not None and began - BEGAN + longest_s > limit_s:
            told(f"no time is left for round {number}")
            return
        for arm in arms:
            arm.take_turn(number, tokens)
        longest_s = max(longest_s, time.perf_counter() - began)


def memory_needed(runs: Sequence[PlannedRun]) -> dict[str, float | None]:
    """What all of them take at once beside what there is, in GB. Ends the program where there is less."""
    plans = [run.plan for run in runs]
    # Weights pass through host memory on their way to a device, those of one model at a time.
    passing = [0 if plan.one_pool or not plan.demand.on_device else plan.demand.resident_bytes for plan in plans]
    host_bytes = sum(plan.host_bytes - weights for plan, weights in zip(plans, passing, strict=True)) + max(passing)
    device_bytes = sum(plan.device_bytes for plan in plans)
    free_bytes = next((run.backend.describe_device().free_bytes for run in runs if run.plan.device_bytes), None)
    available_bytes = available_memory().bytes
    needed = {
        "device_gb": device_bytes / 1e9,
        "device_free_gb": None if free_bytes is None else free_bytes / 1e9,
        "host_gb": host_bytes / 1e9,
        "host_available_gb": available_bytes / 1e9,
    }
    if host_bytes > available_bytes or (free_bytes is not None and device_bytes > free_bytes):
        sys.exit(f"the arms do not fit into memory together: {json.dumps(needed)}; name fewer of them with --arms")
    return needed


def storage_gb_per_s(path: Path, reads_at_once: int, begin: float) -> float | str:
    """The speed of reads of 4 MiB past the page cache, of a GiB from that part of the file on; or why there is none."""
    first_byte = int(path.stat().st_size * begin) // PIECE_BYTES * PIECE_BYTES
    count = min(path.stat().st_size - first_byte, 1 << 30) // PIECE_BYTES
    if not count or not hasattr(os, "O_DIRECT"):
        return "not measured: the file is too small" if not count else "not measured: this system has no O_DIRECT"

    def read(first: int) -> None:
        with mmap.mmap(-1, PIECE_BYTES) as buffer:
            for number in range(first, count, reads_at_once):
                if os.preadv(descriptor, [buffer], first_byte + number * PIECE_BYTES) != PIECE_BYTES:
                    raise OSError("a read came out short")

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        return f"not measured: direct reads are refused: {error}"
    try:
        with ThreadPoolExecutor(reads_at_once) as pool:
            began = time.perf_counter()
            list(pool.map(read, range(reads_at_once)))
            return count * PIECE_BYTES / (time.perf_counter() - began) / 1e9
    except OSError as error:
        return f"not measured: {error}"
    finally:
        os.close(descriptor)


def storage(path: Path, when: str) -> dict[str, Any]:
    """What the drive gives without this library, one read after the other and eight at once.

    Of different parts of the file, so that no cache between here and the drive has the second one.
    """
    return {"storage": when, "gb_per_s": {1: storage_gb_per_s(path, 1, 0.0), 8: storage_gb_per_s(path, 8, 0.5)}}


def told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def put(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def _spread(values: Sequence[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def _split(model: Model, report: GenerationReport) -> dict[str, float]:
    """Where a token's milliseconds went in this text, by what is measured right after it.

    "kernels": its graphs launched one after the other without a wait between; where experts were missing, those of a
    token with none. "disk": the host stands still for reads. "copies": what the bytes copied both ways take at the
    speed of one plain copy measured now; nothing is loaded ahead, so a layer's kernels stand still for its copies, save
    those that run while others are read. "host": what is left, the host's own work and its meetings with the device.
    Where the CPU computes, "disk" and "rest".
    """
    passes, counters = report.decode_passes, report.decode
    token_ms = 1e3 * report.decode_seconds / passes
    disk_ms = 1e3 * counters.disk_wait_s / passes
    if not model.planned.plan.demand.on_device:
        return {"disk": disk_ms, "rest": token_ms - disk_ms}
    copied_bytes = counters.h2d_bytes + counters.d2h_bytes
    kernels_ms = _kernels_ms(model)
    copies_ms = 1e3 * copied_bytes / passes / _copy_bytes_per_s() if copied_bytes else 0.0
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
    parser.add_argument("--backend", default="cuda_discrete", help="of the arms that name none")
    parser.add_argument("--backend-option", action="append", default=[], metavar="NAME.KEY=VALUE")
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--embedding-scale", type=float, default=45.0, help="larger: more various experts")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, help="begin no round that would end later than this")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    parser.add_argument("--profile", action="store_true", help="and where the host's time goes, after the rounds")
    options = parser.parse_args()
    if options.rounds < 1 or options.tokens < 2 or options.tokens >= options.context:
        parser.error("at least 1 round and 2 tokens are needed, and a context of more than the tokens")
    try:
        arms = [Arm.of(arm, options.backend, options.backend_option, options.context) for arm in options.arms]
    except ConfigError as error:
        parser.error(str(error))
    backends = {arm.backend for arm in arms}
    if stray := [option for option in options.backend_option if option.partition(".")[0] not in backends]:
        parser.error(f"no arm is of the backend of {', '.join(stray)}; they are of {', '.join(sorted(backends))}")
    path = options.model
    if not path.exists():
        began = time.perf_counter()
        write_model(path, options.layers, options.experts, options.hidden, options.width, options.embedding_scale)
        put({"written_gb": path.stat().st_size / 1e9, "seconds": time.perf_counter() - began})
    runs = [arm.planned(path) for arm in arms]
    put(versions(options.commit, {run.backend.name: run.backend.describe_device().name for run in runs}))
    put({"memory": memory_needed(runs)})
    put(storage(path, "before"))
    with ExitStack() as stack:
        opened = [OpenArm.opened(arm, run, stack, options.tokens) for arm, run in zip(arms, runs, strict=True)]
        take_turns(opened, options.rounds, options.tokens, options.limit_s)
        for arm in opened:
            put(arm.figures())
            if options.profile:
                _profile(lambda arm=arm: generated(arm.model, options.tokens, 99))
        put(storage(path, "after"))


if __name__ == "__main__":
    main()
