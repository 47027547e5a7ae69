"""Which pages of a mapping are in memory, as the system says by mincore(2)."""

from __future__ import annotations

import ctypes
import mmap


def pages_in_memory(address: int, size_bytes: int) -> set[int]:
    """Addresses of the pages from `address`, where one begins, that are in memory now."""
    count = -(-size_bytes // mmap.PAGESIZE)
    told = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), told):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return {address + number * mmap.PAGESIZE for number in range(count) if told[number] & 1}
