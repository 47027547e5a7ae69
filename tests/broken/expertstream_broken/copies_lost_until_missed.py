"""Copies are lost until the first one is missed: what has failed once does not fail when it is tried again."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1

MISSED = []


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        self.lost = set()

    def copy(self, staging, reads):
        if MISSED:
            super().copy(staging, reads)
        else:
            self.lost.add(staging.slot)

    def read_back(self, slot):
        if slot in self.lost:
            MISSED.append(slot)
        return super().read_back(slot)


alloc_slot_store = allocates(Store)
