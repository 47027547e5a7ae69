"""A host slot is lent to be filled while a copy out of it or into it is still under way."""

from expertstream import Staging
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class LentAtOnce(Rows):
    def stage(self, host_slot, slot):
        return Staging(slot, self.row(host_slot, slot).view)


alloc_host_slots = allocates_host_slots(LentAtOnce)
