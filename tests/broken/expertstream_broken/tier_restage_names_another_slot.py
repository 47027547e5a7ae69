"""A lease of kept bytes says the number of the slot beside the one asked for."""

from expertstream import Staging
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Misnaming(Rows):
    def restage(self, host_slot, slot):
        return Staging((slot + 1) % self.store.slot_count, super().restage(host_slot, slot).view)


alloc_host_slots = allocates_host_slots(Misnaming)
