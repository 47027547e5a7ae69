"""The one staging buffer that could be had is counted as the two that were wanted."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        buffer = self.idle.get()
        self.idle.put(buffer)
        if self.idle.qsize() == 1:
            self.idle.put(buffer)


alloc_slot_store = allocates(Store)
