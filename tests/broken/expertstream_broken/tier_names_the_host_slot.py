"""A lease says the number of the host slot where the slot's belongs."""

from expertstream import Staging
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Misnaming(Rows):
    def stage(self, host_slot, slot):
        return Staging(host_slot, super().stage(host_slot, slot).view)


alloc_host_slots = allocates_host_slots(Misnaming)
