"""Keep memory from being swapped: mlock, and how much of it this process may lock.

Sources: mlock(2), getrlimit(2), proc(5).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_MLOCK_ONFAULT = 1  # Linux, <bits/mman-shared.h>: lock pages as they come, and none now


def wire(address: int, size_bytes: int) -> None:
    """Put whole pages into memory and keep them there. Raises OSError where the system refuses."""
    _call("mlock", address, size_bytes)


def unwire(address: int, size_bytes: int) -> None:
    """Let whole pages go again; they keep their bytes."""
    _call("munlock", address, size_bytes)


def wirable_bytes(wanted_bytes: int) -> tuple[int, str]:
    """How many of `wanted_bytes` the limit on locked memory allows now, and the sentence that says why.

    Takes no memory. The system may still refuse later, where others lock memory in the meantime.
    """
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit_bytes == resource.RLIM_INFINITY:
        return wanted_bytes, "locked memory has no limit"
    locked_bytes = _locked_bytes()
    left_bytes = max(limit_bytes - locked_bytes, 0)
    if wanted_bytes <= left_bytes or _is_above_the_limit(wanted_bytes):
        return wanted_bytes, f"{wanted_bytes} bytes may be locked"
    return left_bytes, (
        f"the limit on locked memory (ulimit -l) is {limit_bytes} bytes, and {locked_bytes} are locked already"
    )


def _locked_bytes() -> int:
    """What this process has locked, as far as the system tells."""
    status = Path("/proc/self/status")
    found = re.search(r"^VmLck:\s+(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    return int(found[1]) * 1024 if found else 0


def _is_above_the_limit(wanted_bytes: int) -> bool:
    """Whether this process is one that the limit does not bind, found out by locking address space without memory."""
    if not hasattr(_libc, "mlock2"):
        return False
    try:
        space = mmap.mmap(-1, wanted_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    except (OSError, OverflowError, ValueError):
        return False
    address = ctypes.c_void_p(np.frombuffer(space, np.uint8).ctypes.data)
    return bool(_libc.mlock2(address, ctypes.c_size_t(wanted_bytes), _MLOCK_ONFAULT) == 0)  # unmapping unlocks it


def _call(name: str, address: int, size_bytes: int) -> None:
    if getattr(_libc, name)(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)):
        number = ctypes.get_errno()
        raise OSError(number, f"{name} of {size_bytes} bytes: {os.strerror(number)}")
