"""Slots in ordinary memory, read in place by the processor that runs the kernels.

One private mapping a store, so that no byte is kept twice; commits are over before they begin.
"""

from __future__ import annotations

import mmap
import platform
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from expertstream import (
    READY,
    Commit,
    DeviceDescription,
    DeviceOutOfMemory,
    SlotBudget,
    SlotLayout,
    SlotStore,
    Staging,
    StoreClosed,
    available_memory,
    hookimpl,
)

EXPERTSTREAM_CONTRACT = 1


class HostStore:
    """Slots one after the other in one anonymous mapping, each aligned, in huge pages where the system has them."""

    def __init__(self, layout: SlotLayout, slot_count: int) -> None:
        self.layout = layout
        self.slot_count = slot_count
        stride_bytes = -(-layout.slot_bytes // layout.alignment) * layout.alignment
        # A mapping begins at a page; a larger alignment is found inside it.
        size_bytes = slot_count * stride_bytes + max(layout.alignment - mmap.PAGESIZE, 0)
        try:
            memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            free_bytes = available_memory().bytes
            raise DeviceOutOfMemory(
                f"{slot_count} slots of {layout.slot_bytes} bytes need {size_bytes} bytes of memory;"
                f" {free_bytes} are available: {error}"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer page faults and TLB misses; direct reads pin fewer pages
            with suppress(OSError):  # EINVAL from a kernel that was built without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        everything = np.frombuffer(memory, np.uint8)
        first = -everything.ctypes.data % layout.alignment
        strides = everything[first : first + slot_count * stride_bytes].reshape(slot_count, stride_bytes)
        self._slots: NDArray[np.uint8] | None = strides[:, : layout.slot_bytes]

    def stage(self, slot: int) -> Staging:
        """The slot itself. Reads announced on a stream are over when the kernel's call returns, so nothing waits."""
        return Staging(slot, self._slot(slot).data)

    def discard(self, staging: Staging) -> None:
        """Nothing to give back."""

    def mark_read(self, slot: int, stream: int) -> None:
        """Nothing to remember: kernels run in the calling thread and have ended."""

    def device_view(self, slot: int) -> NDArray[np.uint8]:
        """The slot itself, (slot_bytes,) uint8."""
        return self._slot(slot)

    def read_back(self, slot: int) -> bytes:
        """A copy of the slot."""
        return self._slot(slot).tobytes()

    def close(self) -> None:
        """Give the mapping up; it is unmapped when the last view of it is gone."""
        self._slots = None

    def _slot(self, slot: int) -> NDArray[np.uint8]:
        if self._slots is None:
            raise StoreClosed("this slot store is closed")
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} of a store with {self.slot_count} slots")
        view: NDArray[np.uint8] = self._slots[slot]
        return view


@hookimpl
def host_memory_is_device_addressable() -> bool:
    """Host memory is all there is."""
    return True


@hookimpl
def budget_for_expert_size(expert_bytes: int, resident_bytes: int, asked: int | None) -> SlotBudget:
    """What is available beside the resident bytes, at most what was asked."""
    available = available_memory()
    room = max(available.bytes - resident_bytes, 0) // expert_bytes
    if asked is not None and asked <= room:
        return SlotBudget(asked, f"all {asked} slots asked for fit: {available.reason}")
    return SlotBudget(
        room, f"{room} slots of {expert_bytes} bytes fit beside {resident_bytes} resident bytes: {available.reason}"
    )


@hookimpl
def alloc_slot_store(layout: SlotLayout, slot_count: int) -> SlotStore:
    """One mapping for all slots."""
    return HostStore(layout, slot_count)


@hookimpl
def commit_slot(store: SlotStore, staging: Staging) -> Commit:
    """The bytes are where kernels read them."""
    return READY


@hookimpl
def describe_device() -> DeviceDescription:
    """The processor as the system names it, and the memory that this process may still take."""
    return DeviceDescription(platform.processor() or platform.machine(), None, available_memory().bytes)
