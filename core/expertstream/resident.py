"""Load the tensors that stay resident, past the page cache where the file system allows it, into one mapping.

Neighbours in the file are read together. What a device backend does with the bytes is not decided here; who has copied
a tensor elsewhere gives its memory back.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from expertstream.checkpoint.index import Checkpoint, TensorInfo
from expertstream.config import IoMode
from expertstream.errors import DeviceOutOfMemory
from expertstream.filler import Fill, Filler, OpenFile, PartRead, open_raw_file
from expertstream.slots import IO_ALIGNMENT_BYTES, READY, SlotLayout, SlotPart, Staging

_PIECE_BYTES = 16 << 20  # between two reports of progress; a multiple of IO_ALIGNMENT_BYTES
_THREADS = 4  # enough large reads under way to keep a drive busy


class ResidentTensors(Mapping[str, NDArray[np.uint8]]):
    """Every resident tensor's bytes by name: (nbytes,) uint8, read-only, in the file's own encoding.

    They share one mapping, freed with the last of them. For one thread at a time.
    """

    def __init__(self, memory: mmap.mmap, tensors: dict[str, NDArray[np.uint8]]) -> None:
        """`tensors` are arrays of the mapping, which this takes over."""
        self._memory = memory
        self._tensors = tensors
        first = int(np.frombuffer(memory, np.uint8).ctypes.data)
        starts = {name: int(data.ctypes.data) - first for name, data in tensors.items()}
        self._spans = {name: (start, start + tensors[name].nbytes) for name, start in starts.items()}

    def __getitem__(self, name: str) -> NDArray[np.uint8]:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def release(self, name: str) -> None:
        """Give a tensor's memory back now: it is not in here any more, and no array of it may be read from then on.

        Pages that another tensor reaches into stay until that one is released. Where the system takes no part of a
        mapping back, all of it stays until the last array is gone. Raises KeyError for what is not in here.
        """
        del self._tensors[name]
        start, end = self._spans.pop(name)
        first, last = start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
        if self._is_in_use(first):
            first += 1
        if self._is_in_use(last - 1):
            last -= 1
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            with suppress(OSError):  # a process that has locked its memory keeps it
                self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)

    def _is_in_use(self, page: int) -> bool:
        begin, end = page * mmap.PAGESIZE, (page + 1) * mmap.PAGESIZE
        return any(start < end and begin < stop for start, stop in self._spans.values())


def resident_padding_bytes(checkpoint: Checkpoint) -> int:
    """How much more than its tensors' bytes the mapping of `load_resident` takes."""
    return sum(run.room_bytes for run in _runs(checkpoint)) - checkpoint.resident_bytes


def load_resident(
    checkpoint: Checkpoint,
    io_mode: IoMode = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    thread_count: int = _THREADS,
    read_timeout_s: float = 120,
    open_file: OpenFile = open_raw_file,
) -> ResidentTensors:
    """Every resident tensor, read. `progress` hears bytes done and of all.

    At most `thread_count` threads read, and never more than keep a drive busy. A read that has not ended after
    `read_timeout_s` is given up. `open_file` opens files, for fault injection. Raises ReadFailed, MachineError for
    io_mode "direct" where it is refused or a thread that cannot be started, ConfigError for no threads,
    CheckpointError for changed files, DeviceOutOfMemory.
    """
    runs = _runs(checkpoint)
    size_bytes = max(sum(run.room_bytes for run in runs), IO_ALIGNMENT_BYTES)
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise DeviceOutOfMemory(f"{size_bytes} bytes of resident tensors cannot be allocated: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # every token reads all of it: fewer TLB misses, and faults while it fills
        with suppress(OSError):  # the headers know the advice, and this kernel was built without it
            memory.madvise(mmap.MADV_HUGEPAGE)
    arena = _Arena(SlotLayout((SlotPart("resident", 0, size_bytes),)), np.frombuffer(memory, np.uint8))
    tensors: dict[str, NDArray[np.uint8]] = {}
    pieces: list[PartRead] = []
    room_start = 0
    for run in runs:
        first_position = room_start + run.offset % IO_ALIGNMENT_BYTES
        pieces += _pieces(run, first_position, room_start)
        for tensor in run.tensors:
            position = first_position + tensor.offset - run.offset
            tensors[tensor.name] = arena.memory[position : position + tensor.nbytes]
            tensors[tensor.name].flags.writeable = False
        room_start += run.room_bytes
    with Filler(
        checkpoint.files,
        lambda store, staging: READY,
        thread_count=min(thread_count, _THREADS),
        io_mode=io_mode,
        read_timeout_s=read_timeout_s,
        open_file=open_file,
        check_file=checkpoint.refuse_written,
    ) as filler:
        checkpoint.refuse_changed()
        done = 0
        tickets = filler.submit([Fill(arena, 0, (piece,), "resident tensors") for piece in pieces])
        for ticket, piece in zip(tickets, pieces, strict=True):
            ticket.wait()
            done += piece.length
            progress(min(done, checkpoint.resident_bytes), checkpoint.resident_bytes)
    return ResidentTensors(memory, tensors)


@frozen(eq=False)
class _Arena:
    """The mapping as a store of one slot, which is filled piece by piece."""

    layout: SlotLayout
    memory: NDArray[np.uint8]

    def stage(self, slot: int) -> Staging:
        return Staging(slot, self.memory.data)

    def discard(self, staging: Staging) -> None:
        """Nothing to give back."""


@frozen
class _Run:
    """Tensors that lie side by side in a file, read as one range."""

    file: int
    offset: int
    end: int
    tensors: tuple[TensorInfo, ...]

    @property
    def room_bytes(self) -> int:
        return -(-self.end // IO_ALIGNMENT_BYTES) * IO_ALIGNMENT_BYTES - self.offset // IO_ALIGNMENT_BYTES * (
            IO_ALIGNMENT_BYTES
        )


def _runs(checkpoint: Checkpoint) -> list[_Run]:
    runs: list[_Run] = []
    for tensor in sorted(checkpoint.tensors.values(), key=lambda tensor: (tensor.file, tensor.offset)):
        end = tensor.offset + tensor.nbytes
        last = runs[-1] if runs else None
        if last and last.file == tensor.file and tensor.offset - last.end < IO_ALIGNMENT_BYTES:
            runs[-1] = _Run(last.file, last.offset, end, (*last.tensors, tensor))
        else:
            runs.append(_Run(tensor.file, tensor.offset, end, (tensor,)))
    return runs


def _pieces(run: _Run, first_position: int, room_start: int) -> list[PartRead]:
    """The run cut at aligned file offsets, so that rounding one piece outwards never reaches into the next."""
    pieces, offset = [], run.offset
    while offset < run.end:
        cut = min(run.end, (offset // IO_ALIGNMENT_BYTES) * IO_ALIGNMENT_BYTES + _PIECE_BYTES)
        position = first_position + offset - run.offset
        pieces.append(PartRead(run.file, offset, cut - offset, position, room_start, run.room_bytes))
        offset = cut
    return pieces
