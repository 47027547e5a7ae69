"""A discrete device made of threads: memory of its own, copies that arrive late, streams that run in order."""

import queue
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from types import SimpleNamespace

import numpy as np

from expertstream import DeviceOutOfMemory, SlotBudget, Staging, StoreClosed, available_memory, hookimpl

EXPERTSTREAM_CONTRACT = 1  # the version of the contract that this module was written for


def aligned_rows(count, size_bytes, alignment):
    stride = -(-size_bytes // alignment) * alignment
    memory = np.zeros(count * stride + alignment, np.uint8)
    return memory[-memory.ctypes.data % alignment :][: count * stride].reshape(count, stride)[:, :size_bytes]


class DeviceStore:
    def __init__(self, layout, slot_count, staging_count=2, copy_s=0.002):
        self.layout, self.slot_count, self.copy_s, self.streams, self.reads = layout, slot_count, copy_s, {}, {}
        self.slots = aligned_rows(slot_count, layout.slot_bytes, layout.alignment)
        self.idle = queue.Queue()  # the staging buffers that neither a lease nor a copy uses
        for buffer in aligned_rows(staging_count, layout.slot_bytes, layout.alignment):
            self.idle.put(buffer)

    def launch(self, stream, work, *arguments):
        return self.streams.setdefault(stream, ThreadPoolExecutor(1)).submit(work, *arguments)

    def stage(self, slot):
        self.device_view(slot)  # refuses a closed store, and a slot that does not exist
        return Staging(slot, self.idle.get().data)  # waits while every buffer is in use

    def discard(self, staging):
        self.idle.put(np.asarray(staging.view))

    def commit(self, staging):
        event = self.launch("copies", self.copy, staging, self.reads.pop(staging.slot, {}))  # set when it has ended
        event.add_done_callback(lambda _: self.discard(staging))  # not lent again before
        return SimpleNamespace(
            done=lambda: event.done() and event.result() is None,  # raises what the copy raised
            wait=event.result,  # blocks the host; order_before blocks the stream, unless the copy has failed
            order_before=lambda stream: (event.done() and event.result()) or self.launch(stream, event.exception),
        )

    def copy(self, staging, reads):
        wait(reads.values())  # new bytes must not land under a kernel that still reads the old ones
        time.sleep(self.copy_s)
        self.slots[staging.slot] = staging.view

    def mark_read(self, slot, stream):
        self.reads.setdefault(slot, {})[stream] = self.launch(stream, lambda: None)  # an event: ends after the reads

    def device_view(self, slot):
        if self.slots is None:
            raise StoreClosed("this slot store is closed")
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} of a store with {self.slot_count} slots")
        return self.slots[slot]

    def read_back(self, slot):
        return self.device_view(slot).tobytes()

    def close(self):
        for stream in self.streams.values():
            stream.shutdown()  # waits for what is under way
        self.slots = self.idle = None  # the slots and the staging buffers


@hookimpl
def host_memory_is_device_addressable():
    return False


@hookimpl
def budget_for_expert_size(expert_bytes, resident_bytes, asked):
    room = max(available_memory().bytes - resident_bytes, 0) // expert_bytes
    slots = room if asked is None else min(asked, room)
    return SlotBudget(slots, f"{room} slots fit beside {resident_bytes} bytes", staging_bytes=2 * expert_bytes)


@hookimpl
def alloc_slot_store(layout, slot_count):
    for staging_count in (2, 1):  # fewer staging buffers will do, but not none
        with suppress(MemoryError):
            return DeviceStore(layout, slot_count, staging_count)
    raise DeviceOutOfMemory(f"asked: {(slot_count + 1) * layout.slot_bytes}, free: {available_memory().bytes}")


@hookimpl
def commit_slot(store, staging):
    return store.commit(staging)


@hookimpl
def launch_read(store, slot, stream, after_ms):
    return store.launch(stream, lambda: time.sleep(after_ms / 1000) or store.read_back(slot)).result
