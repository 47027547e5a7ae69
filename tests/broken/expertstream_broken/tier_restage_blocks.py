"""The host waits in restage for what is on its way into the host slot or out of it."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Blocking(Rows):
    def restage(self, host_slot, slot):
        return self.stage(host_slot, slot)


alloc_host_slots = allocates_host_slots(Blocking)
