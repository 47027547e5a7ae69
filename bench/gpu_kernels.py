"""How fast CUDA kernels read weights, as a fraction of what a plain read of device memory reaches in the same run.

usage: python bench/gpu_kernels.py [TYPE ...] [--repeats 30] [--megabytes 1024] [--json]

Every launch takes other matrices than the one before, over more bytes than the device caches. Launches are captured
into a graph, so that the host's time between them does not count; the arms alternate. Kernels are launched as the ops
launch them, so that one fetches weights while the one ahead of it still computes, and apart, each after the other's
end. Prints GB/s of weight bytes: the median, the quartiles, and the median's fraction of the read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import cupy
import numpy as np
from attrs import asdict, evolve, frozen
from versions import versions

from expertstream_engine.cuda.kernels import Kernels
from expertstream_engine.cuda.launching import Kernel
from expertstream_engine.cuda.tiling import THREADS, Tiling
from expertstream_engine.kernels.row_dots import ROW_DOTS

EXPERTS, HIDDEN, WIDTH = 8, 2048, 768
ROWS, COLUMNS = 4096, 14336

_READ = r"""
extern "C" __global__ void read(const uint4 *words, long long count, unsigned *out) {
    unsigned sum = 0;
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 4 * stride) {
        uint4 four[4];
        for (int k = 0; k < 4; ++k) four[k] = i + k * stride < count ? words[i + k * stride] : uint4{};
        for (int k = 0; k < 4; ++k) sum += four[k].x ^ four[k].y ^ four[k].z ^ four[k].w;
    }
    if (sum == 0xFFFFFFFF) *out = sum;
}
"""


@frozen
class Result:
    """Speeds of weight bytes in GB/s; `us` is the median time of one launch, or of one group of launches."""

    case: str
    type_name: str
    apart: bool
    megabytes: float
    us: float
    gb_per_s: float
    low: float
    high: float
    of_read: float


class Arm:
    """Launches captured into one graph, and the bytes that they read."""

    def __init__(self, stream: Any, launches: list[Callable[[], None]], launch_bytes: int) -> None:
        self.stream, self.launches, self.launch_bytes = stream, len(launches), launch_bytes
        cupy.cuda.Device().synchronize()  # what is read was made on another stream
        for launch in launches[:1]:
            launch()  # loads the kernel, which a capture does not allow
        stream.synchronize()
        stream.begin_capture()
        for launch in launches:
            launch()
        self.graph = stream.end_capture()
        self.graph.launch(stream)
        stream.synchronize()

    def seconds_a_launch(self) -> float:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(self.stream)
        self.graph.launch(self.stream)
        end.record(self.stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / self.launches


def row_bytes(type_name: str, columns: int) -> int:
    row_dot = ROW_DOTS[type_name]
    return columns // row_dot.block_columns * row_dot.block_bytes


def weights(nbytes: int) -> Any:
    """Random bytes that are normal numbers in every format that scales are kept in."""
    return cupy.random.randint(0x20, 0x40, nbytes, dtype=cupy.uint8)


def arms_of(type_name: str, kernels: Kernels, apart: bool, stream: Any, least_bytes: int) -> dict[str, Arm]:
    """One for the large matrix, and for the experts: gate and up, down, and the FFN of one layer."""

    def launched(kernel: Kernel) -> Kernel:
        return evolve(kernel, is_early=False) if apart else kernel

    floats = cupy.random.standard_normal(COLUMNS, dtype=cupy.float32)
    form, records = ROW_DOTS[type_name].activation, cupy.zeros(4 * COLUMNS, cupy.uint8)
    hidden_records = cupy.zeros(4 * WIDTH, cupy.uint8)
    rounding = launched(kernels.layer({"Q8_0": "round_q8_0", "Q8_K": "round_q8_k"}[form]))
    block = {"Q8_0": 32, "Q8_K": 256}[form]

    def round_to(out: Any, x: Any, columns: int, rows: int) -> None:
        rounding((-(-columns // block // 4), rows), 128, (x, columns, out, out.size // rows), stream)

    round_to(records, floats, COLUMNS, 1)
    large_bytes = ROWS * row_bytes(type_name, COLUMNS)
    matrices = [weights(large_bytes) for _ in range(max(2, least_bytes // large_bytes))]
    tables = [cupy.array([matrix.data.ptr, ROWS, 0], cupy.int64) for matrix in matrices]
    out, tiling = cupy.empty(ROWS, cupy.float32), Tiling.of(COLUMNS, 1, type_name)
    multiply = launched(kernels.multiply(type_name, tiling))

    def large(table: Any) -> Callable[[], None]:
        arguments = table, records, records.size, 1, out
        return lambda: multiply((tiling.blocks(ROWS),), THREADS, arguments, stream)

    part_bytes = WIDTH * row_bytes(type_name, HIDDEN), HIDDEN * row_bytes(type_name, WIDTH)
    expert_bytes = 2 * part_bytes[0] + part_bytes[1]
    sets = max(2, least_bytes // (EXPERTS * expert_bytes))
    slots = weights(sets * EXPERTS * expert_bytes)
    firsts = slots.data.ptr + expert_bytes * np.arange(sets * EXPERTS).reshape(sets, EXPERTS, 1)
    addresses = cupy.array(firsts + np.array([0, part_bytes[0], 2 * part_bytes[0]]), cupy.int64)
    starts, tokens = cupy.arange(EXPERTS + 1), cupy.zeros(EXPERTS, cupy.int64)
    hidden, rows = cupy.empty((EXPERTS, WIDTH), cupy.float32), cupy.empty((EXPERTS, HIDDEN), cupy.float32)
    many_records = cupy.zeros(EXPERTS * hidden_records.size, cupy.uint8)
    record_bytes = hidden_records.size
    first_tiling, second_tiling = Tiling.of(HIDDEN, 1, type_name, type_name), Tiling.of(WIDTH, 1, type_name)
    gate_up = launched(kernels.gate_up(type_name, type_name, first_tiling))
    down = launched(kernels.down(type_name, second_tiling))

    def first_half(layer: int) -> None:
        where = addresses[layer], starts, tokens
        arguments = *where, records, 0, records, 0, WIDTH, hidden
        gate_up((first_tiling.blocks(WIDTH), EXPERTS), THREADS, arguments, stream)

    def second_half(layer: int) -> None:
        arguments = addresses[layer], starts, many_records, record_bytes, HIDDEN, rows
        down((second_tiling.blocks(HIDDEN), EXPERTS), THREADS, arguments, stream)

    def ffn(layer: int) -> None:
        round_to(records[: 4 * HIDDEN], floats, HIDDEN, 1)
        first_half(layer)
        round_to(many_records, hidden, WIDTH, EXPERTS)
        second_half(layer)

    weights_and_tables = matrices, tables, slots, addresses, starts, tokens
    keep = weights_and_tables, floats, records, hidden_records, many_records, hidden, rows, out
    halves = {"gate and up": (first_half, 2 * part_bytes[0]), "down": (second_half, part_bytes[1])}
    halves["routed FFN"] = ffn, expert_bytes
    arms = {f"{ROWS} x {COLUMNS}": Arm(stream, [large(table) for table in tables], large_bytes)}
    for name, (launch, nbytes) in halves.items():
        launches: list[Callable[[], None]] = [partial(launch, layer) for layer in range(sets)]
        arms[f"{EXPERTS} experts, {name}"] = Arm(stream, launches, EXPERTS * nbytes)
    for arm in arms.values():
        arm.keep = keep  # type: ignore[attr-defined]  # the graph knows addresses alone
    return arms


def read_arm(stream: Any, nbytes: int) -> Arm:
    """A plain read of one large buffer."""
    buffer, out = weights(nbytes), cupy.zeros(1, cupy.uint32)
    read = cupy.RawKernel(_READ, "read", backend="nvrtc").kernel
    blocks = 16 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    arm = Arm(stream, [lambda: read((blocks,), (256,), (buffer, nbytes // 16, out), 0, stream)], nbytes)
    arm.keep = buffer, out  # type: ignore[attr-defined]  # the graph knows addresses alone
    return arm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=("Q4_K", "Q6_K", "Q8_0"), metavar="TYPE", help="ggml weight types")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--megabytes", type=int, default=1024, help="weights that one turn reads")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(json.dumps(versions(options.commit, device) | {"repeats": options.repeats}), flush=True)
    stream, kernels = cupy.cuda.Stream(non_blocking=True), Kernels()
    plain = read_arm(stream, options.megabytes << 20)
    for type_name in options.types:
        arms = {
            (name, apart): arm
            for apart in (False, True)
            for name, arm in arms_of(type_name, kernels, apart, stream, options.megabytes << 20).items()
        }
        times: dict[tuple[str, bool], list[float]] = {key: [] for key in arms}
        read_speeds = []
        for _ in range(options.repeats):
            read_speeds.append(plain.launch_bytes / plain.seconds_a_launch() / 1e9)
            for key, arm in arms.items():
                times[key].append(arm.seconds_a_launch())
        read_speed = float(np.median(read_speeds))
        for (name, apart), arm in arms.items():
            speeds = arm.launch_bytes / np.array(times[name, apart]) / 1e9
            low, speed, high = (float(part) for part in np.percentile(speeds, (25, 50, 75)))
            microseconds, megabytes = float(np.median(times[name, apart])) * 1e6, arm.launch_bytes / 1e6
            of_read = speed / read_speed
            if options.json:
                result = Result(name, type_name, apart, megabytes, microseconds, speed, low, high, of_read)
                print(json.dumps(asdict(result)), flush=True)
            else:
                print(
                    f"{type_name:5} {name:24} {'apart' if apart else '':5} {megabytes:6.1f} MB {microseconds:7.1f} us"
                    f"  {speed:6.0f} GB/s ({low:.0f}-{high:.0f}), {of_read:.2f} of a plain read at {read_speed:.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
