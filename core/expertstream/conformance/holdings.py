"""What this process and the device hold now, as far as the system and the backend can say: descriptors and memory."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from expertstream import Backend

PROCESS_PAGES = Path("/proc/self/statm")
"""Where the system has it: how many pages this process has mapped, and how many of them lie in memory, by proc(5)."""

DESCRIPTOR_FOLDERS = ("/proc/self/fd", "/dev/fd")
"""Where the system has one: an entry for each descriptor that this process has open, by proc(5) and fd(4)."""


@frozen
class Memory:
    """Memory that can be measured: what it is called, and how to ask for the bytes that it holds."""

    name: str
    held_bytes: Callable[[], int]


def memory_in_use(backend: Backend) -> list[Memory]:
    """Of this process what lies in memory, and of a device with memory of its own all that is not free."""
    return [*_of_process("this process's memory", 1), *_of_device(backend)]


def memory_taken(backend: Backend) -> list[Memory]:
    """As `memory_in_use`, with memory of this process that nobody has touched yet."""
    return [*_of_process("this process's address space", 0), *_of_device(backend)]


def open_descriptors() -> int | None:
    """How many descriptors this process has open; None where the system does not tell."""
    for folder in DESCRIPTOR_FOLDERS:
        with suppress(OSError):
            before = len(os.listdir(folder))
            one_more = os.open(os.devnull, os.O_RDONLY)
            try:
                if len(os.listdir(folder)) == before + 1:  # some systems list the first three, whatever is open
                    return before
            finally:
                os.close(one_more)
    return None


def growth(memories: Sequence[Memory], what: str, use: Callable[[], object], times: int, allowed_bytes: int) -> str:
    """Which memory holds more after `use`, which is called `what`, than is allowed, in words; empty if none does."""
    for _ in range(2):  # what is allocated once for the process is not lost
        use()
    gc.collect()
    before = [memory.held_bytes() for memory in memories]
    for _ in range(times):
        use()
    gc.collect()
    after = [memory.held_bytes() for memory in memories]
    return "; ".join(
        f"{times} times {what}: {memory.name} held {held_before} bytes before and {held_after} bytes after, which are"
        f" {held_after - held_before} more; up to {allowed_bytes} more are allowed"
        for memory, held_before, held_after in zip(memories, before, after, strict=True)
        if held_after - held_before > allowed_bytes
    )


def _of_process(name: str, field: int) -> list[Memory]:
    if not PROCESS_PAGES.exists():
        return []
    return [Memory(name, lambda: int(PROCESS_PAGES.read_text().split()[field]) * mmap.PAGESIZE)]


def _of_device(backend: Backend) -> list[Memory]:
    if backend.host_memory_is_device_addressable():
        return []
    device = backend.describe_device()
    if device.free_bytes is None:
        return []
    all_bytes = device.memory_bytes or device.free_bytes  # at least what is free now
    return [Memory("the device's memory", lambda: all_bytes - (backend.describe_device().free_bytes or 0))]
