"""A host slot whose commit failed raises that failure again when it is to be filled."""

from expertstream import Staging
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Poisoned(Rows):
    def stage(self, host_slot, slot):
        row = self.row(host_slot, slot)
        row.wait_for_copy()
        return Staging(slot, row.view)


alloc_host_slots = allocates_host_slots(Poisoned)
