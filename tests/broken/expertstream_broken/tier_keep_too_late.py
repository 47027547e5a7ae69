"""The copy out of a slot begins only when its host slot is needed, and takes what the slot has then."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class KeptWhenNeeded(Rows):
    def __init__(self, store, slot_count):
        super().__init__(store, slot_count)
        self.to_keep = {}

    def keep(self, slot, host_slot):
        self.row(host_slot, slot)  # refuses what does not exist
        self.to_keep[host_slot] = slot

    def stage(self, host_slot, slot):
        self.to_keep.pop(host_slot, None)
        return super().stage(host_slot, slot)

    def restage(self, host_slot, slot):
        if host_slot in self.to_keep:
            super().keep(self.to_keep.pop(host_slot), host_slot)
        return super().restage(host_slot, slot)


alloc_host_slots = allocates_host_slots(KeptWhenNeeded)
