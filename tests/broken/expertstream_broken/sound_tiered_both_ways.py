"""Not broken: the late backend with host slots, where copies back have a queue of their own.

In one queue all wait for all, and what a broken backend has forgotten to wait for does not show.
"""

from contextlib import suppress

from expertstream import CommitFailed
from expertstream_broken.sound import allocates
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook but those below
from expertstream_broken.sound_tiered import Rows, TieredStore, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class BothWaysStore(TieredStore):
    def commit(self, staging):
        if row := self.rows.get(id(staging.view)):
            self.launch("copies", row.wait_for_copy)  # so what is committed from a host slot is what was kept there
        return super().commit(staging)


class BothWaysRows(Rows):
    def keep(self, slot, host_slot):
        row = self.row(host_slot, slot)
        kept = self.store.launch("copies back", self.take_over_after, row.wait_for_copy, slot, row)
        row.wait_for_copy = kept.result
        self.store.reads.setdefault(slot, {})["copies back"] = kept  # so a refill of the slot waits for it

    def take_over_after(self, wait_for_copy, slot, row):
        with suppress(CommitFailed):  # which is told to whoever committed
            wait_for_copy()
        self.take_over(slot, row)


alloc_slot_store = allocates(BothWaysStore)
alloc_host_slots = allocates_host_slots(BothWaysRows)
