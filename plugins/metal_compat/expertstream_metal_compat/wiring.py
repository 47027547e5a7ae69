"""Keep memory from being swapped: mlock, as much of it as the system allows, and how much that would be.

Sources: mlock(2), mlock2(2), getrlimit(2), proc(5).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_MLOCK_ONFAULT = 1  # Linux, <bits/mman-shared.h>: lock pages as they come, and none now

TRIAL_TAKES_MEMORY = not hasattr(_libc, "mlock2")
"""Whether `wirable` takes, for a moment, the memory that it finds could be wired. Linux locks space without any."""


def wire(address: int, size_bytes: int) -> None:
    """Put whole pages into memory and keep them there. Where the system refuses, raises OSError and keeps none."""
    _lock("mlock", address, size_bytes)


def unwire(address: int, size_bytes: int) -> None:
    """Let whole pages go again; they keep their bytes."""
    _call("munlock", address, size_bytes)


def wire_most(
    address: int, stride_bytes: int, count: int, wire_pages: Callable[[int, int], None] = wire
) -> tuple[int, OSError | None]:
    """Wire as many of `count` strides as the system lets, first one first: how many, and its refusal of the next.

    Each time it refuses, half as many are tried.
    """
    wired, step, refusal = 0, count, None
    while wired < count and step:
        step = min(step, count - wired)
        try:
            wire_pages(address + wired * stride_bytes, step * stride_bytes)
            wired += step
        except OSError as error:
            refusal = error
            step //= 2
    return wired, refusal if wired < count else None


def wirable(beside_bytes: int, stride_bytes: int, count: int) -> tuple[int, str]:
    """How many of `count` strides could be wired now beside so many bytes, and the sentence that says why no more.

    Found out by trying: as much is mapped, wired and given back before this returns.
    """
    beside_bytes = -(-beside_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    size_bytes = beside_bytes + count * stride_bytes
    try:
        space = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        return 0, f"{size_bytes} bytes to try it with cannot be mapped: {error}"
    wire_pages = wire if TRIAL_TAKES_MEMORY else _wire_when_touched
    wired = 0
    with space:
        address = np.frombuffer(space, np.uint8).ctypes.data
        others, refusal = wire_most(address, beside_bytes, 1 if beside_bytes else 0, wire_pages)
        if refusal is None:
            wired, refusal = wire_most(address + beside_bytes, stride_bytes, count, wire_pages)
        unwire(address, others * beside_bytes + wired * stride_bytes)
    return wired, _limit() if refusal is None else f"{refusal.strerror}; {_limit()}"


def _wire_when_touched(address: int, size_bytes: int) -> None:
    """As `wire`, but the pages may come later: they count towards the limit and take no memory."""
    _lock("mlock2", address, size_bytes, _MLOCK_ONFAULT)


def _limit() -> str:
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit_bytes == resource.RLIM_INFINITY:
        return "locked memory has no limit (ulimit -l)"
    return f"the limit on locked memory (ulimit -l) is {limit_bytes} bytes{_locked()}"


def _locked() -> str:
    """What this process has locked, where the system tells."""
    status = Path("/proc/self/status")
    found = re.search(r"^VmLck:\s+(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    return f", and {int(found[1]) * 1024} are locked already" if found else ""


def _lock(name: str, address: int, size_bytes: int, *flags: int) -> None:
    try:
        _call(name, address, size_bytes, *flags)
    except OSError:
        with suppress(OSError):  # it may have locked the first of them
            unwire(address, size_bytes)
        raise


def _call(name: str, address: int, size_bytes: int, *flags: int) -> None:
    if getattr(_libc, name)(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), *flags):
        number = ctypes.get_errno()
        raise OSError(number, f"{name} of {size_bytes} bytes: {os.strerror(number)}")
