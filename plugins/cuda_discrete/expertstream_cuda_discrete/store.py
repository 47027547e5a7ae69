"""A store: slots in one device allocation, staging buffers in one pinned one, and a stream for the copies between.

Order comes from events alone. A copy waits on the device for the readers that `mark_read` told of; a buffer is lent
again when the event after its copy is over; the host waits for nothing but a buffer.
"""

from __future__ import annotations

import ctypes
from collections import deque
from threading import Condition
from typing import Any

from expertstream import DeviceOutOfMemory, SlotLayout, Staging, StoreClosed, get_log
from expertstream_cuda import Device, read_back


class DeviceStore:
    """Slots on `device`. Any thread may call, as `expertstream.slots.SlotStore` says."""

    def __init__(self, device: Device, layout: SlotLayout, slot_count: int, buffer_count: int) -> None:
        """Allocate everything. Pinned memory that cannot be had is halved down to one buffer, which the log says.

        Raises DeviceOutOfMemory with the bytes asked for and free, having given back what it took.
        """
        self.device = device
        self.layout = layout
        self.slot_count = slot_count
        self._runtime = device.runtime
        with device.failing():
            device.use()
        self._stream: int | None = None
        self._memory = self._pinned = 0
        self._memory = _allocated(device, layout, slot_count)
        try:
            self._pinned, buffer_count = self._allocate_pinned(buffer_count)
            with device.failing():
                self._stream = self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking)
        except BaseException:
            self.close()
            raise
        self._first_slot = _aligned(self._memory, layout.alignment)
        self._reads: list[dict[int, Any]] = [{} for _ in range(slot_count)]  # by stream: the event after its last read
        self._spare_events: deque[Any] = deque()
        self._idle: deque[_Buffer] = deque()
        self._returned = Condition()
        first = _aligned(self._pinned, layout.alignment)
        for address in range(first, first + buffer_count * _stride(layout), _stride(layout)):
            room = (ctypes.c_uint8 * layout.slot_bytes).from_address(address)
            self._idle.append(_Buffer(address, memoryview(room).cast("B")))
        self._buffers = {id(buffer.view): buffer for buffer in self._idle}

    def stage(self, slot: int) -> Staging:
        """A buffer whose copy is over; blocks until there is one."""
        self.address(slot)
        with self.device.failing():
            self.device.use()
            with self._returned:
                while not self._idle:
                    self._returned.wait()
                buffer = self._take_idle()
            if buffer.copied is not None:
                try:
                    buffer.copied.synchronize()  # outside the lock: others may return buffers meanwhile
                except BaseException:
                    self._give_back(buffer)  # with its event: the next one waits for it again
                    raise
                buffer.copied = None
        return Staging(slot, buffer.view)

    def discard(self, staging: Staging) -> None:
        """Lend the buffer to the next one."""
        self._give_back(self._buffers[id(staging.view)])

    def commit(self, staging: Staging) -> DeviceCommit:
        """Start the copy; as the hook `commit_slot`."""
        buffer = self._buffers[id(staging.view)]
        slot, runtime, stream = staging.slot, self._runtime, self._stream
        try:
            target = self.address(slot)
            self.device.use()
            readers = self._reads[slot]
            while readers:
                reader, event = next(iter(readers.items()))
                runtime.streamWaitEvent(stream, event.ptr)
                del readers[reader]  # no sooner: a commit that is tried again waits for it again
                self._spare_events.append(event)
            copied = self._event()
            runtime.memcpyAsync(target, buffer.address, self.layout.slot_bytes, runtime.memcpyHostToDevice, stream)
            runtime.eventRecord(copied.ptr, stream)
            buffer.copied = copied
        except runtime.CUDARuntimeError as error:
            raise self.device.commit_failed(slot, error) from error
        finally:
            self._give_back(buffer)
        return DeviceCommit(self.device, slot, copied)

    def mark_read(self, slot: int, stream: int) -> None:
        """An event on the reader's stream, which the next copy into the slot waits for."""
        self.address(slot)
        readers = self._reads[slot]
        with self.device.failing():
            self.device.use()
            event = readers.get(stream)
            if event is None:
                event = self._event()
            self._runtime.eventRecord(event.ptr, stream)
        readers[stream] = event  # no sooner: waiting for an event that was never recorded is not waiting

    def device_view(self, slot: int) -> Any:
        """A CuPy array of the slot, (slot_bytes,) uint8."""
        return self.device.view(self.address(slot), self.layout.slot_bytes, self)

    def read_back(self, slot: int) -> bytes:
        """What a kernel reads there now."""
        return read_back(self.device, self.address(slot), self.layout.slot_bytes)

    def close(self) -> None:
        """Wait for copies and announced readers, then free. Raises MachineError where the device was lost before."""
        stream, self._stream = self._stream, None
        memory, self._memory = self._memory, 0
        pinned, self._pinned = self._pinned, 0
        with self.device.failing():
            self.device.use()
            if stream is not None:
                self._runtime.streamSynchronize(stream)
                for readers in self._reads:
                    for event in readers.values():
                        event.synchronize()
                self._runtime.streamDestroy(stream)
            if memory:
                self._runtime.free(memory)
            if pinned:
                self._runtime.freeHost(pinned)

    def address(self, slot: int) -> int:
        """Where a slot begins on the device. Raises StoreClosed, IndexError."""
        if not self._memory:
            raise StoreClosed("this slot store is closed")
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} of a store with {self.slot_count} slots")
        return self._first_slot + slot * _stride(self.layout)

    def _allocate_pinned(self, buffer_count: int) -> tuple[int, int]:
        """Pinned host memory for as many buffers as can be had, with their number."""
        wanted, stride = buffer_count, _stride(self.layout)
        while True:
            size_bytes = buffer_count * stride + self.layout.alignment
            try:
                pinned = int(self._runtime.hostAlloc(size_bytes, self._runtime.hostAllocPortable))
            except self._runtime.CUDARuntimeError as error:
                if buffer_count == 1:
                    raise DeviceOutOfMemory(
                        f"one staging buffer of {stride} bytes needs {size_bytes} bytes of pinned host memory, which"
                        f" the driver refuses: {error}"
                    ) from error
                buffer_count //= 2
            else:
                if buffer_count < wanted:
                    get_log().warning("fewer_staging_buffers", asked=wanted, got=buffer_count, buffer_bytes=stride)
                return pinned, buffer_count

    def _take_idle(self) -> _Buffer:
        """A buffer that nobody leases: one whose copy is over, else the one whose copy began first. Under the lock."""
        for buffer in self._idle:
            if buffer.copied is None or buffer.copied.done:
                self._idle.remove(buffer)
                buffer.copied = None
                return buffer
        return self._idle.popleft()

    def _give_back(self, buffer: _Buffer) -> None:
        with self._returned:
            self._idle.append(buffer)
            self._returned.notify()

    def _event(self) -> Any:
        """An event that nothing waits for any more, or a new one."""
        import cupy  # when it is needed, see expertstream_cuda

        try:
            return self._spare_events.pop()
        except IndexError:  # asking first would race with another thread
            return cupy.cuda.Event(disable_timing=True)


class DeviceCommit:
    """A copy under way. It outlives the store."""

    __slots__ = ("_copied", "_device", "_slot")

    def __init__(self, device: Device, slot: int, copied: Any) -> None:
        self._device = device
        self._slot = slot
        self._copied = copied

    def done(self) -> bool:
        """Whether the event after the copy is over."""
        try:
            self._device.use()
            return bool(self._copied.done)
        except self._device.runtime.CUDARuntimeError as error:
            raise self._device.commit_failed(self._slot, error) from error

    def wait(self) -> None:
        """Block until it is."""
        try:
            self._device.use()
            self._copied.synchronize()
        except self._device.runtime.CUDARuntimeError as error:
            raise self._device.commit_failed(self._slot, error) from error

    def order_before(self, stream: int) -> None:
        """Make the stream wait for it, not the host."""
        try:
            self._device.use()
            self._device.runtime.streamWaitEvent(stream, self._copied.ptr)
        except self._device.runtime.CUDARuntimeError as error:
            raise self._device.commit_failed(self._slot, error) from error


class _Buffer:
    """A staging buffer; `copied` is the event after its last copy, None when that is known to be over."""

    __slots__ = ("address", "copied", "view")

    def __init__(self, address: int, view: memoryview) -> None:
        self.address = address
        self.view = view
        self.copied: Any = None


def _allocated(device: Device, layout: SlotLayout, slot_count: int) -> int:
    """Device memory for the slots, with room to align it: the driver aligns to less than a page."""
    size_bytes = slot_count * _stride(layout) + layout.alignment
    free_bytes, total_bytes = device.memory()
    try:
        return int(device.runtime.malloc(size_bytes))
    except (device.runtime.CUDARuntimeError, OverflowError) as error:
        raise DeviceOutOfMemory(
            f"{slot_count} slots of {layout.slot_bytes} bytes need {size_bytes} bytes on {device.name};"
            f" {free_bytes} of {total_bytes} are free: {error}"
        ) from error


def _stride(layout: SlotLayout) -> int:
    return _aligned(layout.slot_bytes, layout.alignment)


def _aligned(number: int, alignment: int) -> int:
    return -(-number // alignment) * alignment
