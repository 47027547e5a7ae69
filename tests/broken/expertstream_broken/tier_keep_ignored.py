"""What leaves a slot is not copied anywhere."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Forgetful(Rows):
    def keep(self, slot, host_slot):
        self.row(host_slot, slot)  # refuses what does not exist


alloc_host_slots = allocates_host_slots(Forgetful)
