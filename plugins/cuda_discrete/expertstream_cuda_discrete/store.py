"""A store: slots in one device allocation, buffers in pinned ones, and a stream for the copies between.

Order comes from events alone. A copy waits on the device for the readers that `mark_read` told of; a buffer is filled
again when the event after its copy is over; the host waits for nothing but a buffer. Copies run in the order in which
they were started, both ways, so that what a host slot is to keep has left the slot before new bytes land in it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from contextlib import suppress
from threading import Condition
from typing import Any

from expertstream import (
    IO_ALIGNMENT_BYTES,
    DeviceOutOfMemory,
    SlotLayout,
    Staging,
    StoreClosed,
    StoreMemory,
    available_memory,
    get_log,
)
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
        self._memory = 0
        self._pinned: list[int] = []
        self._pinned_bytes = 0
        self._buffers: dict[int, _Buffer] = {}  # by the id of the view that is lent
        self._memory = _allocated(device, layout, slot_count)
        try:
            buffers = self._allocated_buffers(buffer_count)
            with device.failing():
                self._stream = self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking)
        except BaseException:
            self.close()
            raise
        self._stride_bytes = _stride(layout)
        self._first_slot = _aligned(self._memory, layout.alignment)
        self._reads: list[dict[int, Any]] = [{} for _ in range(slot_count)]  # by stream: the event after its last read
        self._spare_events: deque[Any] = deque()
        self._idle: deque[_Buffer] = deque(buffers)
        self._returned = Condition()
        for buffer in buffers:
            buffer.goes_round = True

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
            kind = runtime.memcpyHostToDevice
            self._copy(buffer, target, buffer.address, kind, copied)
        except runtime.CUDARuntimeError as error:
            raise self.device.commit_failed(slot, error) from error
        finally:
            self._give_back(buffer)
        return DeviceCommit(self.device, slot, copied)

    def host_slots(self, slot_count: int) -> PinnedSlots:
        """More pinned buffers, which keep their bytes; as the hook `alloc_host_slots`."""
        self.address(0)
        with self.device.failing():
            self.device.use()
        return PinnedSlots(self, self._pinned_buffers(slot_count))

    def filled_again(self, buffer: _Buffer, slot: int) -> Staging:
        """Lease a buffer once no copy reads or writes it."""
        self.address(slot)
        with self.device.failing():
            self.device.use()
            if buffer.copied is not None:
                buffer.copied.synchronize()
                buffer.copied = None
        return Staging(slot, buffer.view)

    def keep(self, slot: int, buffer: _Buffer) -> None:
        """Copy a slot into a buffer, after the copies started before and before those started later."""
        source, runtime = self.address(slot), self._runtime
        try:
            self.device.use()
            self._copy(buffer, buffer.address, source, runtime.memcpyDeviceToHost, self._event())
        except runtime.CUDARuntimeError as error:
            raise self.device.commit_failed(slot, error) from error

    def _copy(self, buffer: _Buffer, target: int, source: int, kind: int, copied: Any) -> None:
        """Start a copy into a buffer or out of it, and note the event after it."""
        runtime = self._runtime
        try:
            runtime.memcpyAsync(target, source, self.layout.slot_bytes, kind, self._stream)
            runtime.eventRecord(copied.ptr, self._stream)
            buffer.copied = copied
        except BaseException:
            with suppress(runtime.CUDARuntimeError):
                runtime.streamSynchronize(self._stream)  # nobody else would know that it uses the buffer
            raise

    @property
    def memory(self) -> StoreMemory:
        """What was allocated, with the room to align it."""
        return StoreMemory(_size_bytes(self.layout, self.slot_count), self._pinned_bytes)

    def mark_read(self, slot: int, stream: int) -> None:
        """An event on the reader's stream, which the next copy into the slot waits for."""
        self.address(slot)
        readers = self._reads[slot]
        runtime = self._runtime
        try:  # not `failing`: for every slot of every step, a context made by a generator costs too much
            self.device.use()
            event = readers.get(stream)
            if event is None:
                event = self._event()
            runtime.eventRecord(event.ptr, stream)
        except runtime.CUDARuntimeError as error:
            raise self.device.failed(error) from error
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
        pinned, self._pinned = self._pinned, []
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
            for address in pinned:
                self._runtime.freeHost(address)

    def address(self, slot: int) -> int:
        """Where a slot begins on the device. Raises StoreClosed, IndexError."""
        if not self._memory:
            raise StoreClosed("this slot store is closed")
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} of a store with {self.slot_count} slots")
        return self._first_slot + slot * self._stride_bytes

    def _allocated_buffers(self, buffer_count: int) -> list[_Buffer]:
        """Staging buffers, as many of these as can be had."""
        wanted = buffer_count
        while True:
            try:
                buffers = self._pinned_buffers(buffer_count)
            except DeviceOutOfMemory:
                if buffer_count == 1:
                    raise
                buffer_count //= 2
            else:
                if buffer_count < wanted:
                    size_bytes = _stride(self.layout)
                    get_log().warning("fewer_staging_buffers", asked=wanted, got=buffer_count, buffer_bytes=size_bytes)
                return buffers

    def _pinned_buffers(self, count: int) -> list[_Buffer]:
        """Buffers in one allocation of pinned host memory, which `close` frees. Raises DeviceOutOfMemory."""
        size_bytes = _size_bytes(self.layout, count)
        try:
            pinned = int(self._runtime.hostAlloc(size_bytes, self._runtime.hostAllocPortable))
        except (self._runtime.CUDARuntimeError, OverflowError) as error:
            raise DeviceOutOfMemory(
                f"{count} buffer{'' if count == 1 else 's'} of {_stride(self.layout)} bytes need {size_bytes} bytes of"
                f" pinned host memory, which the driver refuses, with {available_memory().bytes} available: {error}"
            ) from error
        self._pinned.append(pinned)
        self._pinned_bytes += size_bytes
        first, stride = _aligned(pinned, self.layout.alignment), _stride(self.layout)
        buffers = []
        for address in range(first, first + count * stride, stride):
            room = (ctypes.c_uint8 * self.layout.slot_bytes).from_address(address)
            buffers.append(_Buffer(address, memoryview(room).cast("B")))
        self._buffers |= {id(buffer.view): buffer for buffer in buffers}
        return buffers

    def _take_idle(self) -> _Buffer:
        """A buffer that nobody leases: one whose copy is over, else the one whose copy began first. Under the lock."""
        for buffer in self._idle:
            if buffer.copied is None or buffer.copied.done:
                self._idle.remove(buffer)
                buffer.copied = None
                return buffer
        return self._idle.popleft()

    def _give_back(self, buffer: _Buffer) -> None:
        if not buffer.goes_round:
            return
        with self._returned:
            self._idle.append(buffer)
            self._returned.notify()

    def _event(self) -> Any:
        """An event that nothing waits for any more, or a new one."""
        try:
            return self._spare_events.pop()
        except IndexError:  # asking first would race with another thread
            import cupy  # when it is needed, see expertstream_cuda

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


class PinnedSlots:
    """Host slots of a store, as `expertstream.slots.HostSlots` says."""

    def __init__(self, store: DeviceStore, buffers: list[_Buffer]) -> None:
        self._store = store
        self._buffers = buffers

    @property
    def slot_count(self) -> int:
        """How many there are."""
        return len(self._buffers)

    def stage(self, host_slot: int, slot: int) -> Staging:
        """The host slot's buffer, once no copy reads or writes it."""
        return self._store.filled_again(self._buffer(host_slot), slot)

    def restage(self, host_slot: int, slot: int) -> Staging:
        """The host slot's buffer as it is: its copies are over before one that starts now."""
        self._store.address(slot)
        return Staging(slot, self._buffer(host_slot).view)

    def keep(self, slot: int, host_slot: int) -> None:
        """An asynchronous copy out of the slot."""
        self._store.keep(slot, self._buffer(host_slot))

    def _buffer(self, host_slot: int) -> _Buffer:
        if not 0 <= host_slot < len(self._buffers):
            raise IndexError(f"host slot {host_slot} of {len(self._buffers)}")
        return self._buffers[host_slot]


class _Buffer:
    """Pinned memory for one slot. `copied` is the event after its last copy, None when that is known to be over.

    One that `goes_round` is lent to whoever comes next; the others are host slots.
    """

    __slots__ = ("address", "copied", "goes_round", "view")

    def __init__(self, address: int, view: memoryview) -> None:
        self.address = address
        self.view = view
        self.copied: Any = None
        self.goes_round = False


def allocation_bytes(slot_bytes: int, count: int, alignment: int = IO_ALIGNMENT_BYTES) -> int:
    """What so many slots or buffers take, with the room to align them."""
    return count * _aligned(slot_bytes, alignment) + alignment


def _allocated(device: Device, layout: SlotLayout, slot_count: int) -> int:
    """Device memory for the slots, with room to align it: the driver aligns to less than a page."""
    size_bytes = _size_bytes(layout, slot_count)
    free_bytes, total_bytes = device.memory()
    try:
        return int(device.runtime.malloc(size_bytes))
    except (device.runtime.CUDARuntimeError, OverflowError) as error:
        raise DeviceOutOfMemory(
            f"{slot_count} slots of {layout.slot_bytes} bytes need {size_bytes} bytes on {device.name};"
            f" {free_bytes} of {total_bytes} are free: {error}"
        ) from error


def _size_bytes(layout: SlotLayout, slot_count: int) -> int:
    return allocation_bytes(layout.slot_bytes, slot_count, layout.alignment)


def _stride(layout: SlotLayout) -> int:
    return _aligned(layout.slot_bytes, layout.alignment)


def _aligned(number: int, alignment: int) -> int:
    return -(-number // alignment) * alignment
