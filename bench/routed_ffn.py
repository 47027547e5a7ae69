"""How much of the memory's bandwidth a layer's routed FFN reaches: one call, against a parallel numba sum.

usage: python bench/routed_ffn.py [TYPE ...] [--threads 2] [--rounds 15] [--room-mib 512] [--json]

Arms take turns in one process: eight experts of 2048 x 768 in one call, one expert of 4096 x 14336 in one call, each
through `NumbaOps.routed_ffn` on slots of an anonymous mapping as the cpu backend makes them, and the sum of the same
bytes by threads that each run a compiled loop over their half. Every call reads other experts, until the room has been
read once; the ratio is between passes over the whole room that follow each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import numpy as np
from numba import njit

from expertstream import SlotLayout, SlotPart, open_backend
from expertstream_engine.ops.numba_ops import NumbaOps
from expertstream_engine.ops.protocol import ExpertFfn, Projection

SHAPES = {"8 experts of 2048 x 768": (8, 2048, 768), "1 expert of 4096 x 14336": (1, 4096, 14336)}
PAGE = 4096


def main() -> None:
    arguments = _arguments()
    results = []
    with NumbaOps(arguments.threads) as ops, ThreadPoolExecutor(arguments.threads) as pool:
        for type_name in arguments.types:
            ops.prepare([type_name], lambda name: None)
            for title, shape in SHAPES.items():
                figures = _measure(ops, pool, type_name, shape, arguments)
                results.append({"type": type_name, "call": title, **figures})
                if not arguments.json:
                    print(
                        f"{type_name:5} {title:25} {figures['ffn_gb_s']:6.2f} GB/s of weights, sum"
                        f" {figures['sum_gb_s']:6.2f}; ratio {figures['ratio_median']:.3f}"
                        f" ({figures['ratio_lowest']:.3f} to {figures['ratio_highest']:.3f})",
                        flush=True,
                    )
    if arguments.json:
        print(json.dumps({"threads": arguments.threads, "rounds": arguments.rounds, "results": results}))


def _measure(
    ops: NumbaOps, pool: ThreadPoolExecutor, type_name: str, shape: tuple[int, int, int], arguments: argparse.Namespace
) -> dict[str, float]:
    experts, hidden, width = shape
    ffn = ExpertFfn(
        _projection(type_name, width, hidden),
        _projection(type_name, width, hidden),
        _projection(type_name, hidden, width),
    )
    part_bytes = [projection.rows * projection.row_bytes for projection in (ffn.gate, ffn.up, ffn.down)]
    rooms = [-(-size // PAGE) * PAGE for size in part_bytes]
    offsets = [0, rooms[0], rooms[0] + rooms[1]]
    layout = SlotLayout(
        tuple(SlotPart(name, at, room) for name, at, room in zip(("gate", "up", "down"), offsets, rooms, strict=True))
    )
    calls = max(arguments.room_mib * (1 << 20) // (layout.slot_bytes * experts), 1)
    store = open_backend("cpu").alloc_slot_store(layout, calls * experts)
    random = np.random.default_rng(0)
    views = [np.asarray(store.device_view(slot)) for slot in range(store.slot_count)]
    one = random.integers(0x20, 0x40, layout.slot_bytes, dtype=np.uint8)  # every scale a normal number
    for view in views:
        view[:] = one
    bases = np.array([view.ctypes.data for view in views], np.int64).reshape(calls, experts)
    addresses = bases[:, :, None] + np.array(offsets)
    words = [view[: sum(part_bytes) // 8 * 8].view(np.int64) for view in views]
    x = random.standard_normal((1, hidden), dtype=np.float32)
    starts, tokens = np.arange(experts + 1), np.zeros(experts, np.int64)

    def run_ffn() -> None:
        for number in range(calls):
            ops.routed_ffn(ffn, addresses[number], x, starts, tokens)

    def run_sum() -> None:
        list(pool.map(lambda thread: _sums(words, thread, arguments.threads), range(arguments.threads)))

    run_ffn()
    run_sum()
    times: dict[str, list[float]] = {"ffn": [], "sum": []}
    for _ in range(arguments.rounds):
        for name, run in (("ffn", run_ffn), ("sum", run_sum)):
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    store.close()
    weight_bytes = sum(part_bytes) * calls * experts
    ratios = [sum_s / ffn_s for sum_s, ffn_s in zip(times["sum"], times["ffn"], strict=True)]
    return {
        "ffn_gb_s": weight_bytes / statistics.median(times["ffn"]) / 1e9,
        "sum_gb_s": weight_bytes / statistics.median(times["sum"]) / 1e9,
        "ratio_median": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
    }


def _projection(type_name: str, rows: int, columns: int) -> Projection:
    block_columns, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    return Projection(type_name, rows, columns, columns // block_columns * block_bytes)


def _sums(words: list[np.ndarray[Any, np.dtype[np.int64]]], thread: int, threads: int) -> int:
    share = words[0].size // threads
    return sum(int(_sum(each[thread * share : (thread + 1) * share])) for each in words)


@njit(nogil=True)
def _sum(words: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    total = 0
    for word in words:
        total += word
    return total


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=("Q4_K", "Q6_K", "Q8_0"), metavar="TYPE")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--room-mib", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
