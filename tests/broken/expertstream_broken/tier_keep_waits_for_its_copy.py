"""The host waits in keep for its copy, which waits for little: copies back have a queue of their own."""

from expertstream_broken.sound_tiered import allocates_host_slots
from expertstream_broken.sound_tiered_both_ways import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered_both_ways import BothWaysRows

EXPERTSTREAM_CONTRACT = 1


class Blocking(BothWaysRows):
    def keep(self, slot, host_slot):
        super().keep(slot, host_slot)
        self.rows[host_slot].wait_for_copy()


alloc_host_slots = allocates_host_slots(Blocking)
