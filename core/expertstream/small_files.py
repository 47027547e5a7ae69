"""Files that a user names to be read whole: ordinary ones, and no more of them than such a file may hold."""

from __future__ import annotations

import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def kind_of(mode: int) -> str:
    """What a file of that `st_mode` is, for people."""
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "an ordinary file")


def read_small_file(path: Path, most_bytes: int) -> bytes:
    """All bytes of an ordinary file of at most that many. It never blocks on a pipe and never reads a device.

    Raises OSError where the file cannot be read, and ValueError where it is something else or larger, saying which.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):  # asked before it is opened, which on a pipe waits until somebody writes to it
        raise ValueError(f"it is {kind_of(mode)}, not an ordinary file")
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)  # not what `stat` says: a file may grow, or be made as it is read
    if len(content) > most_bytes:
        raise ValueError(f"it is longer than {most_bytes} bytes")
    return content
