"""How fast weight kernels read weights, against a plain parallel sum of the same bytes measured in turns with them.

usage: python bench/kernels.py [TYPE ...] [--threads 2] [--repeats 15] [--tokens 1 32] [--json]

Every thread takes its share of the rows of each matrix, one matrix after the other, over more bytes than caches hold.
Prints GB/s of weight bytes, the ratio to the sum and its quartiles, and how many times faster several tokens at once
are than one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from attrs import asdict, frozen
from numba import njit
from numpy.typing import NDArray

from expertstream_engine.kernels.native import call_round_rows, call_rows
from expertstream_engine.kernels.registry import SUPPORTED_TYPES, activation_kernel, weight_kernel
from expertstream_engine.kernels.row_dots import ROW_DOTS
from expertstream_engine.kernels.vector_ir import Target, flavours_for

SHAPES = {
    "small": ((768, 2048), (768, 2048), (2048, 768)),
    "large": ((14336, 4096), (14336, 4096), (4096, 14336)),
}
"""Rows and columns of the gate, up and down matrices of an expert."""


@frozen
class Result:
    """Speeds are medians; the ratio is of the kernel's speed to the sum's, with its quartiles."""

    type_name: str
    shape: str
    tokens: int
    gb_per_s: float
    sum_gb_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    token_speedup: float


class Case:
    """Matrices of one type, `least_bytes` of them at least, and rounded activations for `tokens`."""

    def __init__(self, type_name: str, shape: str, tokens: int, least_bytes: int, threads: int) -> None:
        self.kernel, self.tokens, self.threads = weight_kernel(type_name), tokens, threads
        self.records = {columns: self._round(columns) for _, columns in SHAPES[shape]}
        self.out = np.zeros((tokens, max(rows for rows, _ in SHAPES[shape])), np.float32)
        self.weights: list[NDArray[np.uint8]] = []
        calls: list[list[int]] = []
        rng, row_dot = np.random.default_rng(0), ROW_DOTS[type_name]
        while sum(weights.size for weights in self.weights) < least_bytes:
            for rows, columns in SHAPES[shape]:
                row_bytes = columns // row_dot.block_columns * row_dot.block_bytes
                # Bytes in this range are normal numbers in every format that scales are kept in.
                weights, records = rng.integers(0x20, 0x40, (rows, row_bytes), dtype=np.uint8), self.records[columns]
                calls.append([weights.ctypes.data, row_bytes, rows, columns, records.ctypes.data, records.shape[1]])
                self.weights.append(weights)
        self.weight_bytes, self.calls = sum(weights.size for weights in self.weights), np.array(calls)

    def multiply(self, thread: int) -> None:
        _multiply(self.kernel.address, self.calls, thread, self.threads, self.tokens, self.out)

    def multiply_token_by_token(self, thread: int) -> None:
        for _ in range(self.tokens):
            _multiply(self.kernel.address, self.calls, thread, self.threads, 1, self.out)

    def sum(self, thread: int) -> None:
        for weights in self.weights:
            words = weights.reshape(-1)[: weights.size // 8 * 8].view(np.int64)
            share = words.size // self.threads
            _sum(words[thread * share : (thread + 1) * share])

    def _round(self, columns: int) -> NDArray[np.uint8]:
        rounding = activation_kernel(self.kernel.activation)
        x = np.random.default_rng(columns).standard_normal((self.tokens, columns), dtype=np.float32)
        records = np.zeros((self.tokens, rounding.bytes_for(columns)), np.uint8)
        _round(rounding.address, x, records)
        return records


@njit(nogil=True)
def _round(function: int, x: NDArray[np.float32], records: NDArray[np.uint8]) -> None:
    call_round_rows(function, x.ctypes.data, x.shape[1], x.shape[1], x.shape[0], records.ctypes.data, records.shape[1])


@njit(nogil=True)
def _multiply(
    function: int, calls: NDArray[np.int64], thread: int, threads: int, tokens: int, out: NDArray[np.float32]
) -> None:
    for i in range(calls.shape[0]):
        weights, row_bytes, rows, columns, records, record_bytes = calls[i]
        first, last = rows * thread // threads, rows * (thread + 1) // threads
        call_rows(
            function, weights, row_bytes, first, last, columns, records, record_bytes, tokens,
            out.ctypes.data, out.shape[1],
        )  # fmt: skip


@njit(nogil=True)
def _sum(words: NDArray[np.int64]) -> int:
    total = 0
    for word in words:
        total += word
    return total


def measure(type_name: str, shape: str, tokens: int, threads: int, repeats: int, least_bytes: int) -> Result:
    """Alternate the kernel with the sum, and with itself token by token."""
    case = Case(type_name, shape, tokens, least_bytes, threads)
    works = [case.multiply, case.sum, case.multiply_token_by_token]
    with ThreadPoolExecutor(threads) as pool:

        def seconds(work: Callable[[int], None]) -> float:
            begin = time.perf_counter()
            list(pool.map(work, range(threads)))
            return time.perf_counter() - begin

        times = np.array([[seconds(work) for work in works] for _ in range(repeats + 1)])
    together, alone, one_by_one = times[1:].T  # the first turn compiles
    low, ratio, high = (float(part) for part in np.percentile(alone / together, (25, 50, 75)))
    speed, sum_speed = (case.weight_bytes / 1e9 / float(np.median(column)) for column in (together, alone))
    speedup = float(np.median(one_by_one / together))
    return Result(type_name, shape, tokens, speed, sum_speed, ratio, low, high, speedup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=SUPPORTED_TYPES, metavar="TYPE", help="ggml weight types; all")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--weights-mb", type=int, default=128, help="megabytes read in one turn; an eighth of it with tokens"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 32))
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    target = Target.of_numba()
    machine = {
        "machine": platform.machine(), "cpu": target.cpu, "flavour": flavours_for(target)[0], "threads": options.threads
    }  # fmt: skip
    print(json.dumps(machine) if options.json else " ".join(f"{name} {value}" for name, value in machine.items()))
    for type_name in options.types:
        for shape in SHAPES:
            for tokens in options.tokens:
                least_bytes = options.weights_mb * 1_000_000 // (8 if tokens > 1 else 1)
                result = measure(type_name, shape, tokens, options.threads, options.repeats, least_bytes)
                if options.json:
                    print(json.dumps(asdict(result)), flush=True)
                else:
                    print(
                        f"{type_name:7} {shape:5} tokens {tokens:3}  {result.gb_per_s:6.2f} GB/s of weights, "
                        f"sum {result.sum_gb_per_s:6.2f}, ratio {result.ratio:.2f} "
                        f"({result.ratio_low:.2f}-{result.ratio_high:.2f}), "
                        f"{result.token_speedup:.1f} times token by token",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
