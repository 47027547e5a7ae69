"""What is committed from a host slot may leave it before `keep` has filled it: two queues, in no order."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Unordered(Rows):
    def keep(self, slot, host_slot):
        row = self.row(host_slot, slot)
        kept = self.store.launch("copies back", self.take_over, slot, row)
        row.wait_for_copy = kept.result
        self.store.reads.setdefault(slot, {})["copies back"] = kept  # so a refill of the slot waits for it


alloc_host_slots = allocates_host_slots(Unordered)
