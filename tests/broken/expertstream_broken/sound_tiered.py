"""Not broken: the late backend with host slots, whose copies both ways go through one queue, in order.

`allocates_host_slots` makes the hook of a class of host slots, as `sound.allocates` does of a store's.
"""

import time
from contextlib import suppress

from expertstream_fakedevice import aligned_rows

from expertstream import CommitFailed, DeviceOutOfMemory, Staging, StoreMemory, available_memory, hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook but those below
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class TieredStore(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        self.staging_count = self.idle.qsize()
        self.rows = {}  # by the id of the view that is lent: the host slot

    def commit(self, staging):
        row = self.rows.get(id(staging.view))
        commit = super().commit(staging)
        if row is not None:
            row.wait_for_copy = commit.wait
        return commit

    def end_lease(self, staging, error):
        if id(staging.view) not in self.rows:
            super().end_lease(staging, error)

    def discard(self, staging):
        if id(staging.view) not in self.rows:
            super().discard(staging)

    def close(self):
        super().close()
        for row in self.rows.values():
            row.memory = row.view = row.wait_for_copy = None  # whoever has the host slots has no memory of them
        self.rows = {}


class Row:
    def __init__(self, memory):
        self.memory, self.view = memory, memory.data
        self.wait_for_copy = lambda: None  # the last of those in and out of it


class Kept(Staging):
    """A lease of kept bytes, which broken stores tell from others by its class."""


class Rows:
    def __init__(self, store, slot_count):
        self.store, self.slot_count = store, slot_count
        self.rows = [Row(memory) for memory in self.allocated(slot_count)]
        store.rows |= {id(row.view): row for row in self.rows}

    def allocated(self, slot_count):
        return aligned_rows(slot_count, self.store.layout.slot_bytes, self.store.layout.alignment)

    def row(self, host_slot, slot):
        self.store.device_view(slot)  # refuses a closed store, and a slot that does not exist
        if not 0 <= host_slot < self.slot_count:
            raise IndexError(f"host slot {host_slot} of {self.slot_count}")
        return self.rows[host_slot]

    def stage(self, host_slot, slot):
        row = self.row(host_slot, slot)
        with suppress(CommitFailed):  # which is told to whoever committed
            row.wait_for_copy()
        return Staging(slot, row.view)

    def restage(self, host_slot, slot):
        return Kept(slot, self.row(host_slot, slot).view)

    def keep(self, slot, host_slot):
        row = self.row(host_slot, slot)
        row.wait_for_copy = self.store.launch("copies", self.take_over, slot, row).result

    def take_over(self, slot, row):
        time.sleep(self.store.copy_s)
        row.memory[:] = self.store.slots[slot]


def allocates_host_slots(rows_class):
    """The hook alloc_host_slots that makes host slots of this class."""

    @hookimpl
    def alloc_host_slots(store, slot_count):
        try:
            return rows_class(store, slot_count)
        except (MemoryError, ValueError) as error:  # a number too large for numpy is no MemoryError
            asked_bytes = slot_count * store.layout.slot_bytes
            raise DeviceOutOfMemory(f"{asked_bytes} bytes asked for, {available_memory().bytes} free") from error

    return alloc_host_slots


@hookimpl
def measure_store(store):
    slot_bytes = store.layout.slot_bytes
    return StoreMemory(store.slot_count * slot_bytes, (store.staging_count + len(store.rows)) * slot_bytes)


alloc_slot_store = allocates(TieredStore)
alloc_host_slots = allocates_host_slots(Rows)
