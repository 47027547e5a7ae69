"""Slots in one mapping of page-aligned host memory, which is staging, slot and kernel's view at once.

A refill waits for the reads that were announced: a slot knows the number of the last work that may read it.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from expertstream import DeviceOutOfMemory, SlotLayout, Staging, StoreClosed, StoreMemory, available_memory, get_log
from expertstream_metal_compat.mlx import Mlx
from expertstream_metal_compat.streams import Streams
from expertstream_metal_compat.wiring import unwire, wire_most

Wiring = Literal["try", "require", "off"]


def slot_stride_bytes(slot_bytes: int, alignment: int = 1) -> int:
    """From one slot to the next: a device takes a buffer without a copy if it is whole pages, which may be 16 KiB."""
    unit = _unit_bytes(alignment)
    return -(-slot_bytes // unit) * unit


class WiredStore:
    """Slots of whole pages, one after the other.

    Unless `wiring` is "off", as many slots are locked into memory as the system lets. With "try", the others work as
    well, but may be swapped, and a warning says how many bytes are wired and how many are not. Raises DeviceOutOfMemory
    with the bytes asked for and available, or with the bytes that could be wired where all are required.
    """

    def __init__(self, layout: SlotLayout, slot_count: int, *, wiring: Wiring, mlx: Mlx | None) -> None:
        self.layout = layout
        self.slot_count = slot_count
        self._stride_bytes = slot_stride_bytes(layout.slot_bytes, layout.alignment)
        self._pages: NDArray[np.uint8] | None = _map(slot_count, self._stride_bytes, layout)
        self.wired_bytes = 0 if wiring == "off" else self._wire(wiring)
        self._streams = Streams()
        self._readers: list[dict[int, int]] = [{} for _ in range(slot_count)]  # of each slot: stream, last work
        self._readers_lock = Lock()
        self._mlx = mlx
        self._views: list[Any] = []
        if mlx is None:
            self._views += [pages[: layout.slot_bytes] for pages in self._pages]
            return
        try:
            self._views += mlx.adopt(self._pages, layout.slot_bytes)
        except DeviceOutOfMemory:
            self.close()
            raise

    def stage(self, slot: int) -> Staging:
        """The slot itself, once the announced reads are over."""
        pages = self._slot(slot)
        with self._readers_lock:
            readers, self._readers[slot] = self._readers[slot], {}
        for stream, number in readers.items():
            self._streams.wait(stream, number)
        return Staging(slot, pages.data)

    def discard(self, staging: Staging) -> None:
        """Nothing to give back."""

    def mark_read(self, slot: int, stream: int) -> None:
        """Remember the last work launched on the stream; with MLX, also what the calling thread launched there."""
        self._slot(slot)
        if self._mlx is not None:
            self._streams.launch(stream, partial(self._mlx.wait, self._mlx.mark()))
        number = self._streams.last_launched(stream)
        with self._readers_lock:
            self._readers[slot][stream] = number

    @property
    def memory(self) -> StoreMemory:
        """What the mapping takes."""
        return StoreMemory(self.slot_count * self._stride_bytes, self.wired_bytes)

    def device_view(self, slot: int) -> Any:
        """The slot itself, (slot_bytes,) uint8: a numpy array, or an MLX array where the store was made for MLX."""
        self._slot(slot)
        return self._views[slot]

    def read_back(self, slot: int) -> bytes:
        """A copy of the slot."""
        return self._slot(slot).tobytes()

    def launch_read(self, slot: int, stream: int, after_ms: int) -> Callable[[], bytes]:
        """As the hook of this name."""
        pages = self._slot(slot)

        def read() -> bytes:
            time.sleep(after_ms / 1000)
            return pages.tobytes()

        return self._streams.launch(stream, read).result

    def close(self) -> None:
        """Wait for reads under way and give the mapping up; it is unmapped when the last view of it is gone."""
        self._streams.close()
        pages, self._pages = self._pages, None
        self._views = []
        if pages is not None and self.wired_bytes:
            unwire(pages.ctypes.data, self.wired_bytes)  # not only when unmapped: someone may have kept a view

    def _slot(self, slot: int) -> NDArray[np.uint8]:
        if self._pages is None:
            raise StoreClosed("this slot store is closed")
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} of a store with {self.slot_count} slots")
        view: NDArray[np.uint8] = self._pages[slot, : self.layout.slot_bytes]
        return view

    def _wire(self, wiring: Wiring) -> int:
        """Lock as many slots as the system lets; the bytes that were locked."""
        assert self._pages is not None, "a store is wired while it is made"
        address, total_bytes = self._pages.ctypes.data, self._pages.nbytes
        wired_slots, refusal = wire_most(address, self._stride_bytes, self.slot_count)
        wired_bytes = wired_slots * self._stride_bytes
        if refusal is None:
            return wired_bytes
        if wiring == "require":
            unwire(address, wired_bytes)
            self._pages = None
            raise DeviceOutOfMemory(
                f"{self.slot_count} slots, {total_bytes} bytes, are to be wired; the first {wired_slots} could be,"
                f' {wired_bytes} bytes, and then: {refusal.strerror}; ask for as many, or set wire = "try"'
            ) from refusal
        get_log().warning(
            "slots_wired_in_part",
            wired_slots=wired_slots,
            slot_count=self.slot_count,
            wired_bytes=wired_bytes,
            unwired_bytes=total_bytes - wired_bytes,
            error=refusal.strerror,
            remedy='raise the limit on locked memory (ulimit -l), or set wire = "off"',
        )
        return wired_bytes


def _map(slot_count: int, stride_bytes: int, layout: SlotLayout) -> NDArray[np.uint8]:
    """Memory of zeros, (slot_count, stride_bytes), whose rows begin at a page and at the layout's alignment."""
    size_bytes = slot_count * stride_bytes
    unit_bytes = _unit_bytes(layout.alignment)
    available = available_memory()
    refusal = (
        f"{slot_count} slots of {layout.slot_bytes} bytes, each {stride_bytes} bytes of whole pages, need {size_bytes}"
        f" bytes of memory; {available.bytes} are available: {available.reason}"
    )
    if size_bytes > available.bytes:  # wiring takes every page at once, and what is not there ends the process
        raise DeviceOutOfMemory(refusal)
    try:
        memory = mmap.mmap(-1, size_bytes + unit_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise DeviceOutOfMemory(f"{refusal}; the system says: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer page faults and TLB misses; direct reads pin fewer pages
        with suppress(OSError):  # EINVAL from a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = np.frombuffer(memory, np.uint8)
    start = -mapped.ctypes.data % unit_bytes
    return mapped[start : start + size_bytes].reshape(slot_count, stride_bytes)


def _unit_bytes(alignment: int) -> int:
    """What slots begin at multiples of: whole pages, and the alignment asked for, which may be no multiple of one."""
    return math.lcm(mmap.PAGESIZE, alignment)
