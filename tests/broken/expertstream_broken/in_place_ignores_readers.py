"""Staging that is the slot itself is lent while a kernel still reads the slot."""

from expertstream_broken.sound import InPlaceStore, allocates
from expertstream_broken.sound_in_place import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


class Store(InPlaceStore):
    def mark_read(self, slot, stream):
        pass


alloc_slot_store = allocates(Store)
