"""A host slot is filled by way of a staging buffer of the store, and waits for a free one."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class ByWayOfStaging(Rows):
    def stage(self, host_slot, slot):
        staging = super().stage(host_slot, slot)
        self.store.idle.put(self.store.idle.get())
        return staging


alloc_host_slots = allocates_host_slots(ByWayOfStaging)
