"""Whoever reads a slot is forgotten when it is to be filled with kept bytes."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Forgetful(Rows):
    def restage(self, host_slot, slot):
        staging = super().restage(host_slot, slot)
        self.store.reads.pop(slot, None)
        return staging


alloc_host_slots = allocates_host_slots(Forgetful)
