"""A store in host memory: one anonymous mapping, registered with the device where that has to be asked for.

Staging is the slot. Announced readers are waited for on the host, before the slot is lent again.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertstream import DeviceOutOfMemory, SlotLayout, Staging, StoreClosed, StoreMemory, available_memory
from expertstream_cuda import Device, read_back

_REGISTER_MAPPED = 0x02  # cudaHostRegisterMapped: driver_types.h


class HostStore:
    """Slots that the host writes and `device` reads. Any thread may call, as `expertstream.slots.SlotStore` says."""

    def __init__(self, device: Device, layout: SlotLayout, slot_count: int, *, registered: bool) -> None:
        """Map everything, and register it if asked. Raises DeviceOutOfMemory with the bytes asked for and free."""
        self.device = device
        self.layout = layout
        self.slot_count = slot_count
        self._registered_at: int | None = None
        self._stride = -(-layout.slot_bytes // layout.alignment) * layout.alignment
        size_bytes = slot_count * self._stride + layout.alignment
        self.memory = StoreMemory(size_bytes, size_bytes if registered else 0)  # registering pins it
        try:
            memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise self._refusal(size_bytes, error) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer page faults, and fewer pages to pin
            with suppress(OSError):  # EINVAL from a kernel that was built without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        if registered:
            try:
                device.use()
                device.runtime.hostRegister(whole.ctypes.data, size_bytes, _REGISTER_MAPPED)
            except device.runtime.CUDARuntimeError as error:
                raise self._refusal(size_bytes, error) from error
            self._registered_at = int(whole.ctypes.data)
        first = -int(whole.ctypes.data) % layout.alignment
        room = whole[first : first + slot_count * self._stride]
        self._slots: NDArray[np.uint8] | None = room.reshape(slot_count, self._stride)[:, : layout.slot_bytes]
        self._reads: list[dict[int, Any]] = [{} for _ in range(slot_count)]  # by stream: the event after its last read

    def stage(self, slot: int) -> Staging:
        """The slot itself, once its announced readers are done."""
        view = self._slot(slot)
        readers = self._reads[slot]
        with self.device.failing():
            self.device.use()
            while readers:
                stream, event = next(iter(readers.items()))
                event.synchronize()
                del readers[stream]  # no sooner: whoever tries again after a failure waits for it again
        return Staging(slot, view.data)

    def discard(self, staging: Staging) -> None:
        """Nothing to give back."""

    def mark_read(self, slot: int, stream: int) -> None:
        """An event on the reader's stream, which `stage` waits for."""
        import cupy  # when it is needed, see expertstream_cuda

        self._slot(slot)
        with self.device.failing():
            self.device.use()
            event = cupy.cuda.Event(disable_timing=True)
            self.device.runtime.eventRecord(event.ptr, stream)
        self._reads[slot][stream] = event

    def device_view(self, slot: int) -> Any:
        """A CuPy array of the slot, (slot_bytes,) uint8, over the host's own bytes."""
        return self.device.view(self.address(slot), self.layout.slot_bytes, self)

    def read_back(self, slot: int) -> bytes:
        """What a kernel reads there now."""
        return read_back(self.device, self.address(slot), self.layout.slot_bytes)

    def close(self) -> None:
        """Wait for announced readers, then give the mapping up: no view of a slot may be read from then on.

        A device view keeps the store alive, not the mapping. Raises MachineError where the device was lost before.
        """
        if self._slots is None:
            return
        self._slots = None
        with self.device.failing():
            self.device.use()
            for readers in self._reads:
                for event in readers.values():
                    event.synchronize()
            if self._registered_at is not None:
                self.device.runtime.hostUnregister(self._registered_at)

    def address(self, slot: int) -> int:
        """Where a slot begins, for host and device alike. Raises StoreClosed, IndexError."""
        return int(self._slot(slot).ctypes.data)

    def _slot(self, slot: int) -> NDArray[np.uint8]:
        if self._slots is None:
            raise StoreClosed("this slot store is closed")
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} of a store with {self.slot_count} slots")
        view: NDArray[np.uint8] = self._slots[slot]
        return view

    def _refusal(self, size_bytes: int, error: Exception) -> DeviceOutOfMemory:
        return DeviceOutOfMemory(
            f"{self.slot_count} slots of {self.layout.slot_bytes} bytes need {size_bytes} bytes of memory that"
            f" {self.device.name} reads; {available_memory().bytes} are available: {error}"
        )
