"""The host waits in keep for the copies out of its host slot, and only then starts its own."""

from expertstream_broken.sound_tiered import allocates_host_slots
from expertstream_broken.sound_tiered_both_ways import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered_both_ways import BothWaysRows

EXPERTSTREAM_CONTRACT = 1


class Waiting(BothWaysRows):
    def keep(self, slot, host_slot):
        self.row(host_slot, slot).wait_for_copy()
        super().keep(slot, host_slot)


alloc_host_slots = allocates_host_slots(Waiting)
