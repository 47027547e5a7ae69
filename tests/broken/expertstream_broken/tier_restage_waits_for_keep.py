"""The host waits in restage for what keep brings into the host slot, and for no copy out of it."""

from expertstream_broken.sound_tiered import allocates_host_slots
from expertstream_broken.sound_tiered_both_ways import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered_both_ways import BothWaysRows

EXPERTSTREAM_CONTRACT = 1


class Waiting(BothWaysRows):
    def __init__(self, store, slot_count):
        super().__init__(store, slot_count)
        self.wait_for_keep = {}

    def keep(self, slot, host_slot):
        super().keep(slot, host_slot)
        self.wait_for_keep[host_slot] = self.rows[host_slot].wait_for_copy

    def restage(self, host_slot, slot):
        if host_slot in self.wait_for_keep:
            self.wait_for_keep[host_slot]()
        return super().restage(host_slot, slot)


alloc_host_slots = allocates_host_slots(Waiting)
