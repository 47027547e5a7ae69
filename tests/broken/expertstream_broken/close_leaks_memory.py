"""A list for debugging keeps the memory of every store that was ever opened."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


EVER_OPENED = []


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        EVER_OPENED.append(self.slots)


alloc_slot_store = allocates(Store)
