"""Every piece of a store's tier begins where the first one begins."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Overlapping(Rows):
    def allocated(self, slot_count):
        rows = super().allocated(slot_count)
        first = next(iter(self.store.rows.values())).memory if self.store.rows else rows[0]
        return [first, *rows[1:]]


alloc_host_slots = allocates_host_slots(Overlapping)
