"""All stores copy into the slots of the one that was opened last."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


SHARED = {}


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        SHARED["slots"] = self.slots

    def copy(self, staging, reads):
        own, self.slots = self.slots, SHARED["slots"]
        try:
            super().copy(staging, reads)
        finally:
            self.slots = own


alloc_slot_store = allocates(Store)
