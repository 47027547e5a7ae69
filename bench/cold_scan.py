"""How fast the filler reads every routed expert of a checkpoint, against the best plain direct reader.

usage: python bench/cold_scan.py CHECKPOINT [--rounds 10] [--slots 32] [--threads 8] [--io-mode auto] [--json]

Both arms read the same bytes in one process, in turn, with the file dropped from the page cache before each. The
plain reader (threads that preadv into one buffer each) is swept over block sizes and thread counts, twice; its fastest
setting then takes turns with the filler. The ratio is the median over neighbouring runs, because a shared disk swings
more from minute to minute than the arms differ.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from attrs import frozen

from expertstream.checkpoint import Checkpoint, open_checkpoint
from expertstream.config import IoMode
from expertstream.filler import Fill, Filler, PartRead, Ticket
from expertstream.size_classes import size_classes
from expertstream.slots import IO_ALIGNMENT_BYTES, READY, ExpertKey, SlotLayout, Staging

BLOCK_MIB = (1, 4, 8, 16)
THREAD_COUNTS = (4, 8, 16)


def main() -> None:
    arguments = _arguments()
    checkpoint = open_checkpoint(arguments.checkpoint)
    ranges = list(_routed_ranges(checkpoint))
    settings = [(mib, threads) for mib in BLOCK_MIB for threads in THREAD_COUNTS]
    sweep = dict.fromkeys(settings, 0.0)
    for setting in settings * 2:
        sweep[setting] = max(sweep[setting], _cold(checkpoint, partial(_plain_scan, checkpoint, ranges, *setting)))
    best = max(settings, key=lambda setting: sweep[setting])
    plain: list[float] = []
    filler: list[float] = []
    arms = [
        (plain, partial(_plain_scan, checkpoint, ranges, *best)),
        (filler, partial(_filler_scan, checkpoint, arguments.slots, arguments.threads, arguments.io_mode)),
    ]
    for _ in range(arguments.rounds):
        for rates, scan in arms:
            rates.append(_cold(checkpoint, scan))
        arms.reverse()
    ratios = [ours / theirs for ours, theirs in zip(filler, plain, strict=True)]
    result = {
        "checkpoint": arguments.checkpoint.name,
        "routed_bytes": checkpoint.routed_bytes,
        "io_mode": arguments.io_mode,
        "plain": {"block_mib": best[0], "threads": best[1], **_spread(plain)},
        "filler": {"threads": arguments.threads, "slots": arguments.slots, **_spread(filler)},
        "ratio": round(statistics.median(ratios), 3),
        "lowest_ratio": round(min(ratios), 3),
        "highest_ratio": round(max(ratios), 3),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{checkpoint.routed_bytes / 1e9:.2f} GB of routed experts, {arguments.rounds} rounds")
    for arm in ("plain", "filler"):
        print(f"  {arm:7}" + "  ".join(f"{name} {value}" for name, value in result[arm].items()))
    lowest, highest = result["lowest_ratio"], result["highest_ratio"]
    print(f"  filler / best plain reader: {result['ratio']:.1%} ({lowest:.1%} to {highest:.1%})")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--slots", type=int, default=32, help="slots in the ring that the filler fills")
    parser.add_argument("--threads", type=int, default=8, help="threads of the filler")
    parser.add_argument("--io-mode", choices=["auto", "direct", "buffered"], default="auto")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _spread(rates: list[float]) -> dict[str, float]:
    return {
        "median_gb_s": round(statistics.median(rates), 3),
        "lowest_gb_s": round(min(rates), 3),
        "highest_gb_s": round(max(rates), 3),
        "runs": len(rates),
    }


def _cold(checkpoint: Checkpoint, scan: Callable[[], float]) -> float:
    """GB/s of a scan, which returns its seconds, of files that are not in the page cache."""
    for path in checkpoint.files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return checkpoint.routed_bytes / scan() / 1e9


def _routed_ranges(checkpoint: Checkpoint) -> Iterator[tuple[int, int, int]]:
    """File number, offset and end of the routed bytes; parts that lie next to each other are joined."""
    parts = sorted(
        (int(file), int(offset), int(offset) + part.expert_bytes)
        for layer in checkpoint.layers
        for part in layer.parts
        for file, offset in zip(part.files, part.offsets, strict=True)
    )
    file, begin, end = parts[0]
    for next_file, next_begin, next_end in parts[1:]:
        if (next_file, next_begin) != (file, end):
            yield file, begin, end
            file, begin = next_file, next_begin
        end = next_end
    yield file, begin, end


def _plain_scan(checkpoint: Checkpoint, ranges: list[tuple[int, int, int]], block_mib: int, thread_count: int) -> float:
    """Seconds that threads need to read the ranges in blocks, rounded outwards, past the page cache."""
    block_bytes = block_mib << 20
    blocks = deque(
        (file, offset)
        for file, begin, end in ranges
        for offset in range(begin - begin % IO_ALIGNMENT_BYTES, end, block_bytes)
    )
    ends = {
        (file, offset): end
        for file, begin, end in ranges
        for offset in range(begin - begin % IO_ALIGNMENT_BYTES, end, block_bytes)
    }
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in checkpoint.files]
    buffers = [mmap.mmap(-1, block_bytes) for _ in range(thread_count)]
    for buffer in buffers:
        buffer[::IO_ALIGNMENT_BYTES] = bytes(
            block_bytes // IO_ALIGNMENT_BYTES
        )  # its pages exist before the clock starts

    def read(buffer: mmap.mmap) -> None:
        view = memoryview(buffer)
        while True:
            try:
                file, offset = blocks.popleft()
            except IndexError:
                return
            wanted_bytes = ends[file, offset] - offset
            size = min(block_bytes, -(-wanted_bytes // IO_ALIGNMENT_BYTES) * IO_ALIGNMENT_BYTES)
            got = os.preadv(descriptors[file], [view[:size]], offset)
            if got < min(size, wanted_bytes):
                raise OSError(f"a short read at {offset}: {got} of {size} bytes")

    threads = [threading.Thread(target=read, args=(buffer,)) for buffer in buffers]
    began_at = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began_at
    for descriptor in descriptors:
        os.close(descriptor)
    return seconds


@frozen(eq=False)
class _Ring:
    """Slots in one mapping that the filler reads into; nobody reads them back."""

    layout: SlotLayout
    slot_count: int
    view: memoryview

    @classmethod
    def make(cls, layout: SlotLayout, slot_count: int) -> _Ring:
        memory = mmap.mmap(-1, layout.slot_bytes * slot_count)
        memory[::IO_ALIGNMENT_BYTES] = bytes(len(memory) // IO_ALIGNMENT_BYTES)
        return cls(layout, slot_count, memoryview(memory))

    def stage(self, slot: int) -> Staging:
        return Staging(slot, self.view[slot * self.layout.slot_bytes : (slot + 1) * self.layout.slot_bytes])

    def discard(self, staging: Staging) -> None:
        pass

    def mark_read(self, slot: int, stream: int) -> None:
        pass

    def device_view(self, slot: int) -> object:
        return self.stage(slot).view

    def read_back(self, slot: int) -> bytes:
        return bytes(self.stage(slot).view)

    def close(self) -> None:
        pass


def _filler_scan(checkpoint: Checkpoint, slot_count: int, thread_count: int, io_mode: IoMode) -> float:
    """Seconds that the filler needs to read every routed expert once, with a ring of slots under way."""
    rings = {
        layer: ring
        for size_class in size_classes(checkpoint)
        for ring in [_Ring.make(size_class.layout, slot_count)]
        for layer in size_class.layers
    }
    with Filler(checkpoint.files, lambda store, staging: READY, thread_count=thread_count, io_mode=io_mode) as filler:
        began_at = time.perf_counter()
        under_way: deque[Ticket] = deque()
        number = 0
        for layer in checkpoint.layers:
            for expert in range(layer.expert_count):
                if len(under_way) == slot_count:
                    under_way.popleft().wait()
                ring = rings[layer.layer]
                reads = []
                for part, room in zip(layer.parts, ring.layout.parts, strict=True):
                    offset = int(part.offsets[expert])
                    position = room.offset + offset % IO_ALIGNMENT_BYTES
                    reads.append(
                        PartRead(
                            int(part.files[expert]), offset, part.expert_bytes, position, room.offset, room.room_bytes
                        )
                    )
                key = ExpertKey(layer.layer, expert)
                under_way += filler.submit([Fill(ring, number % slot_count, tuple(reads), key)])
                number += 1
        for ticket in under_way:
            ticket.wait()
        seconds = time.perf_counter() - began_at
        assert filler.bytes_read == checkpoint.routed_bytes
    return seconds


if __name__ == "__main__":
    main()
