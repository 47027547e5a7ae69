"""Read parts of one checkpoint file into slots, past the page cache where the file system allows it.

It owns opening, probing, the fall back to buffered reads, and the loop that makes a read whole. It owns no
thread and no slot.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from attrs import Attribute, field, frozen, validators

from expertstream.config import IoMode
from expertstream.errors import CheckpointError, MachineError, ReadFailed
from expertstream.limits import Unfinished, within
from expertstream.log import get_log
from expertstream.slots import IO_ALIGNMENT_BYTES

LARGEST_READ_BYTES = 1 << 30
"""One system call delivers at most 2,147,479,552 bytes, and some systems refuse to be asked for more."""


def _position_matches_offset(instance: PartRead, attribute: Attribute[int], position: int) -> None:
    if (position - instance.offset) % IO_ALIGNMENT_BYTES:
        raise ValueError(
            f"position {position} and file offset {instance.offset} differ modulo {IO_ALIGNMENT_BYTES}: "
            "a direct read would not land in place"
        )


def _holds_the_part(instance: PartRead, attribute: Attribute[int], room_bytes: int) -> None:
    start, end = instance.room_offset, instance.room_offset + room_bytes
    if start % IO_ALIGNMENT_BYTES or end % IO_ALIGNMENT_BYTES:
        raise ValueError(f"the room [{start}, {end}) is not aligned to {IO_ALIGNMENT_BYTES}")
    if instance.position < start or instance.position + instance.length > end:
        raise ValueError(
            f"{instance.length} bytes at position {instance.position} do not lie in the room [{start}, {end})"
        )


@frozen
class PartRead:
    """`length` bytes at `offset` of file number `file`, and the byte `position` in the slot where the first lands.

    A direct read is rounded outwards and overwrites bytes around the part, never outside its room: because
    position and offset agree modulo IO_ALIGNMENT_BYTES, and because the room is aligned, they cannot leave it.
    """

    file: int = field(validator=validators.ge(0))
    offset: int = field(validator=validators.ge(0))
    length: int = field(validator=validators.gt(0))
    position: int = field(validator=_position_matches_offset)
    room_offset: int = field(validator=validators.ge(0))
    room_bytes: int = field(validator=_holds_the_part)


class RawFile(Protocol):
    """An open file. `pread_into` may be called from many threads at once."""

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Bytes read into the start of `buffer`: fewer than asked is legal, 0 is the end. Raises OSError."""
        ...

    def close(self) -> None:
        """Called once, last."""
        ...


OpenFile = Callable[[Path, bool], RawFile]
"""Opens a path for reading, past the page cache if the second argument is true. Raises OSError."""


def open_raw_file(path: Path, direct: bool) -> RawFile:
    """The real file; OSError with ENOTSUP where this system cannot bypass its page cache."""
    bypass_flag: int = getattr(os, "O_DIRECT", 0)
    bypass_command: int | None = getattr(fcntl, "F_NOCACHE", None)
    if direct and not bypass_flag and bypass_command is None:
        raise OSError(errno.ENOTSUP, "this system has no reads past the page cache", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (bypass_flag if direct else 0))
    try:
        if direct and not bypass_flag and bypass_command is not None:  # not run on the machine this was written on
            fcntl.fcntl(descriptor, bypass_command, 1)
        if not direct and hasattr(os, "posix_fadvise"):
            # Experts are read whole and in no order: read-ahead fetches bytes that nobody asked for. Measured cold,
            # in turns, on a disk with 8 MiB of read-ahead: 1.25 to 1.9 GB/s with this advice, 0.4 to 1.4 without.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    except OSError:
        os.close(descriptor)
        raise
    return _DescriptorFile(descriptor)


class SourceFile:
    """One checkpoint file, opened and probed, from which parts are read by any number of threads at once."""

    def __init__(
        self, path: Path, io_mode: IoMode, open_file: OpenFile = open_raw_file, read_timeout_s: float = 120
    ) -> None:
        """Open it and try direct reads, which are given up after `read_timeout_s`.

        Raises CheckpointError (it cannot be opened), ReadFailed (or read), MachineError (direct reads refused).
        """
        self._path = path
        self._may_fall_back = io_mode == "auto"
        self._open_file = open_file
        self._read_timeout_s = read_timeout_s
        self._is_given_up = False
        self._fallback_lock = threading.Lock()
        self._direct: RawFile | None = None
        self._buffered: RawFile | None = None
        self._reads_direct = io_mode != "buffered" and self._probe()
        if not self._reads_direct:
            self._buffered = self._open(direct=False)

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self._path

    @property
    def reads_direct(self) -> bool:
        """True while reads bypass the page cache; a file falls back to buffered reads at most once."""
        return self._reads_direct

    def read(self, part: PartRead, view: memoryview, announce: Callable[[Path, int, int], None]) -> None:
        """Read a part into its place in `view`, the whole slot, which begins at an aligned address.

        `announce(path, offset, length)` is called before each system call. Blocks. Raises ReadFailed.
        """
        if self._reads_direct:
            try:
                return self._read_direct(part, view, announce)
            except _NotDirect as refusal:
                if not self._may_fall_back:
                    raise self._failure(part, refusal.got_bytes, refusal.reason) from refusal.__cause__
                self._fall_back(refusal.reason)
        return self._read_buffered(part, view, announce)

    def close(self) -> None:
        """Close it; no read may be under way."""
        for raw in (self._direct, self._buffered):
            if raw is not None:
                raw.close()
        self._direct = self._buffered = None

    def _probe(self) -> bool:
        """Whether direct reads work, found out by trying."""
        try:
            self._direct = within(self._read_timeout_s, self._open_direct)
        except _NotDirect as refusal:
            if not self._may_fall_back:
                raise MachineError(
                    f"direct reads were asked for, but {self._path} does not allow them: {refusal.reason}; "
                    "use I/O mode auto or buffered, or another file system"
                ) from refusal.__cause__
            self._warn_of_fall_back(refusal.reason)
            return False
        except Unfinished as error:
            raise ReadFailed(
                f"trying direct reads of {self._path}: the storage has not answered for {self._read_timeout_s:g} s, and"
                " the read was given up; see to its file system or, where that is only slow, raise the read timeout"
            ) from error
        finally:
            self._is_given_up = self._direct is None
        return True

    def _open_direct(self) -> RawFile:
        """Open for direct reads and try two: some file systems accept the open and refuse the read.

        Whoever asked may have left. So nobody but this closes what it opens, once no read is under way.
        """
        raw = self._open(direct=True)
        is_of_use = False
        try:
            with mmap.mmap(-1, IO_ALIGNMENT_BYTES) as page, memoryview(page) as view:
                if self._probe_read(raw, view, 0) == IO_ALIGNMENT_BYTES:
                    self._probe_read(raw, view, IO_ALIGNMENT_BYTES)
            is_of_use = not self._is_given_up
        finally:
            if not is_of_use:
                raw.close()
        return raw

    def _probe_read(self, raw: RawFile, view: memoryview, offset: int) -> int:
        while True:
            try:
                return raw.pread_into(view, offset)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno in _REFUSES_DIRECT:
                    raise _NotDirect(f"a direct read at offset {offset}: {_reason(error)}", 0) from error
                raise ReadFailed(
                    f"reading {self._path} at offset {offset}, {len(view)} bytes wanted, 0 read: {_reason(error)}"
                ) from error

    def _open(self, *, direct: bool) -> RawFile:
        try:
            return self._open_file(self._path, direct)
        except OSError as error:
            if direct and error.errno in _REFUSES_DIRECT:
                raise _NotDirect(f"opening for direct reads: {_reason(error)}", 0) from error
            message = f"opening {self._path} for reading: {_reason(error)}"
            if error.errno in _NO_DESCRIPTOR:
                raise MachineError(f"{message}; raise the limit of open files (ulimit -n)") from error
            raise CheckpointError(message) from error

    @property
    def _direct_raw(self) -> RawFile:
        assert self._direct is not None, "read directly before the open or after the close"
        return self._direct

    def _read_direct(self, part: PartRead, view: memoryview, announce: Callable[[Path, int, int], None]) -> None:
        raw = self._direct_raw
        wanted_end = part.offset + part.length
        rounded_end = -(-wanted_end // IO_ALIGNMENT_BYTES) * IO_ALIGNMENT_BYTES
        shift = part.position - part.offset
        at = reached = part.offset - part.offset % IO_ALIGNMENT_BYTES
        while reached < wanted_end:
            length = min(rounded_end - at, LARGEST_READ_BYTES)
            announce(self._path, at, length)
            got_bytes = max(0, reached - part.offset)
            try:
                # Released at once, so that an error kept by somebody keeps no view of the slot alive.
                with view[at + shift : at + shift + length] as window:
                    end = at + raw.pread_into(window, at)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno in _REFUSES_DIRECT:
                    raise _NotDirect(_reason(error), got_bytes) from error
                raise self._failure(part, got_bytes, _reason(error)) from error
            if end == at:
                raise self._failure(part, got_bytes, "the file ends there")
            if end <= reached:
                raise _NotDirect(f"direct reads come to a halt at offset {reached}, where the file may end", got_bytes)
            # A short read may end anywhere, but the next must begin at a block: some bytes are read again.
            reached, at = end, end - end % IO_ALIGNMENT_BYTES

    def _read_buffered(self, part: PartRead, view: memoryview, announce: Callable[[Path, int, int], None]) -> None:
        raw = self._buffered
        assert raw is not None, "read after the close"
        at, wanted_end, shift = part.offset, part.offset + part.length, part.position - part.offset
        while at < wanted_end:
            length = min(wanted_end - at, LARGEST_READ_BYTES)
            announce(self._path, at, length)
            try:
                with view[at + shift : at + shift + length] as window:
                    got = raw.pread_into(window, at)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._failure(part, at - part.offset, _reason(error)) from error
            if got == 0:
                raise self._failure(part, at - part.offset, "the file ends there")
            at += got

    def _fall_back(self, reason: str) -> None:
        with self._fallback_lock:
            if not self._reads_direct:
                return  # another thread's read was refused first
            self._buffered = self._open(direct=False)
            # The direct descriptor stays open: other threads may be reading from it.
            self._reads_direct = False
        self._warn_of_fall_back(reason)

    def _warn_of_fall_back(self, reason: str) -> None:
        get_log().warning("direct_reads_refused", path=str(self._path), reason=reason, io_mode="buffered")

    def _failure(self, part: PartRead, got_bytes: int, reason: str) -> ReadFailed:
        return ReadFailed(
            f"reading {self._path} at offset {part.offset}, {part.length} bytes wanted, {got_bytes} read: {reason}"
        )


_REFUSES_DIRECT = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


class _NotDirect(Exception):
    """Direct reads of this file are refused; `got_bytes` of the part were read before."""

    def __init__(self, reason: str, got_bytes: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.got_bytes = got_bytes


class _DescriptorFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        return os.preadv(self._descriptor, (buffer,), offset)

    def close(self) -> None:
        os.close(self._descriptor)


def _reason(error: OSError) -> str:
    if error.errno is None:
        return str(error)
    text = f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"
    if error.errno == errno.EIO:
        text += ": the storage failed; this does not mean that the file is damaged"
    return text
