"""Host slots come from one pool of the process, by their number."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Pooled(Rows):
    def allocated(self, slot_count):
        rows = POOL.setdefault((self.store.layout, len(self.store.rows)), [])
        if len(rows) < slot_count:
            rows.extend(super().allocated(slot_count - len(rows)))
        return rows[:slot_count]


POOL = {}
alloc_host_slots = allocates_host_slots(Pooled)
