"""How fast slots of a discrete device are filled, against plain asynchronous copies of equal sizes from pinned memory.

usage: python bench/gpu_copies.py [--repeats 21] [--json]

The arms alternate. Ours stages and commits without reading a file; the plain one copies from as many pinned buffers and
records an event after each copy. Prints GB/s: the median and the quartiles, and the median ratio of the pairs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from versions import versions

from expertstream import SlotLayout, SlotPart, open_backend

SIZES_MIB = (1, 2, 8)
BUFFERS = 8
SLOTS = 32


def commits(backend: Any, store: Any, count: int) -> None:
    """Fill slots one after the other, and wait for the last one."""
    commit = None
    for number in range(count):
        staging = store.stage(number % SLOTS)
        commit = backend.commit_slot(store, staging)
    assert commit is not None
    commit.wait()


def plain_copies(stream: Any, pinned: int, memory: int, size_bytes: int, count: int) -> None:
    """Copy from buffers in turn, waiting for a buffer's last copy as anyone must before filling it again."""
    import cupy

    runtime = cupy.cuda.runtime
    events: list[Any] = [None] * BUFFERS
    for number in range(count):
        buffer = number % BUFFERS
        if events[buffer] is not None:
            events[buffer].synchronize()
        source, target = pinned + buffer * size_bytes, memory + number % SLOTS * size_bytes
        runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyHostToDevice, stream.ptr)
        events[buffer] = cupy.cuda.Event(disable_timing=True)
        events[buffer].record(stream)
    stream.synchronize()


def gb_per_s(work: Callable[[], None], nbytes: int) -> float:
    begin = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - begin) / 1e9


def main() -> None:
    import cupy

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    backend = open_backend("cuda_discrete")
    stream = cupy.cuda.Stream(non_blocking=True)
    print(
        json.dumps(versions(options.commit, backend.describe_device().name) | {"repeats": options.repeats}), flush=True
    )
    for size_mib in SIZES_MIB:
        size_bytes = size_mib << 20
        store = backend.alloc_slot_store(SlotLayout((SlotPart("all", 0, size_bytes),)), SLOTS)
        pinned, memory = cupy.cuda.alloc_pinned_memory(BUFFERS * size_bytes), cupy.empty(SLOTS * size_bytes, cupy.uint8)
        count = max(64, (512 << 20) // size_bytes)
        pairs = []
        for _ in range(options.repeats + 1):
            ours = gb_per_s(partial(commits, backend, store, count), count * size_bytes)
            copies = partial(plain_copies, stream, pinned.ptr, memory.data.ptr, size_bytes, count)
            pairs.append((ours, gb_per_s(copies, count * size_bytes)))
        store.close()
        both = np.array(pairs[1:])
        quartiles = np.percentile(both, (25, 50, 75), axis=0).T
        ratio = float(np.median(both[:, 0] / both[:, 1]))
        if options.json:
            result = {"mib": size_mib, "ratio": ratio, "commit": quartiles[0].tolist(), "plain": quartiles[1].tolist()}
            print(json.dumps(result), flush=True)
        else:
            texts = [f"{middle:5.1f} ({low:.1f}-{high:.1f})" for low, middle, high in quartiles]
            print(
                f"{size_mib} MiB  commits {texts[0]} GB/s, plain copies {texts[1]} GB/s, ratio {ratio:.3f}", flush=True
            )


if __name__ == "__main__":
    main()
