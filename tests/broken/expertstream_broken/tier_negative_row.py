"""Host slot -1 is the last one."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class FromTheEnd(Rows):
    def row(self, host_slot, slot):
        self.store.device_view(slot)  # refuses a closed store, and a slot that does not exist
        return self.rows[host_slot]


alloc_host_slots = allocates_host_slots(FromTheEnd)
