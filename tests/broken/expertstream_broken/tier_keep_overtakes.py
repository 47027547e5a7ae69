"""`keep` has a queue of its own, and writes to a host slot before what is there has been copied out."""

from expertstream_broken.sound import allocates
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, TieredStore, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Store(TieredStore):
    def commit(self, staging):
        if kept := getattr(self.rows.get(id(staging.view)), "kept", None):
            self.launch("copies", kept.exception)  # so what is committed from a host slot is what was kept there
        return super().commit(staging)


class KeptAside(Rows):
    def keep(self, slot, host_slot):
        row = self.row(host_slot, slot)
        row.kept = self.store.launch("copies back", self.take_over, slot, row)
        row.wait_for_copy = row.kept.result
        self.store.launch("copies", row.kept.exception)  # so what is kept is what the slot had


alloc_slot_store = allocates(Store)
alloc_host_slots = allocates_host_slots(KeptAside)
