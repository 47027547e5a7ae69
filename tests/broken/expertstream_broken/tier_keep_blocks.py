"""The host waits in keep for its copy."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Blocking(Rows):
    def keep(self, slot, host_slot):
        super().keep(slot, host_slot)
        self.rows[host_slot].wait_for_copy()


alloc_host_slots = allocates_host_slots(Blocking)
