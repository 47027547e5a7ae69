"""Processes that may lock little memory, and a system that lets little be locked."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

_LIMITED = """
import ctypes, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit_bytes}, {limit_bytes}))
libc = ctypes.CDLL(None, use_errno=True)
if hasattr(libc, "capset"):  # Linux, where CAP_IPC_LOCK (14) is above the limit: <linux/capability.h>
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << 14)  # the effective ones
    sets[1] &= ~(1 << 14)  # the permitted ones
    assert libc.capset(header, sets) == 0
"""


def run_limited(limit_bytes: int, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that may lock so many bytes, also where the tests run as root."""
    return subprocess.run(
        [sys.executable, "-c", _LIMITED.format(limit_bytes=limit_bytes) + code, *arguments],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


class LittleLocked:
    """Stands for the system's calls: at most `limit_bytes` are locked at once, and part of what is refused stays so."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.pages: set[int] = set()
        self.called: set[str] = set()

    @property
    def locked_bytes(self) -> int:
        return len(self.pages) * mmap.PAGESIZE

    def call(self, name: str, address: int, size_bytes: int, *flags: int) -> None:
        self.called.add(name)
        page_bytes = mmap.PAGESIZE
        assert address % page_bytes == 0
        for page in range(address // page_bytes, -(-(address + size_bytes) // page_bytes)):
            if name == "munlock":
                self.pages.discard(page)
            elif page not in self.pages and self.locked_bytes + page_bytes > self.limit_bytes:
                raise OSError(12, "no room")
            else:
                self.pages.add(page)
