"""A host slot whose lease ended with a discard is never lent again: only a commit counts as an end."""

from threading import Semaphore

from expertstream import Staging
from expertstream_broken.sound import allocates
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, TieredStore, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Store(TieredStore):
    def commit(self, staging):
        if row := self.rows.get(id(staging.view)):
            row.free.release()
        return super().commit(staging)


class Counted(Rows):
    def __init__(self, store, slot_count):
        super().__init__(store, slot_count)
        for row in self.rows:
            row.free = Semaphore()

    def stage(self, host_slot, slot):
        self.row(host_slot, slot).free.acquire()
        return super().stage(host_slot, slot)

    def restage(self, host_slot, slot):
        row = self.row(host_slot, slot)
        row.free.acquire()
        return Staging(slot, row.view)


alloc_slot_store = allocates(Store)
alloc_host_slots = allocates_host_slots(Counted)
