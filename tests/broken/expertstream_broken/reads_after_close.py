"""A closed store still shows what its slots held."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def read_back(self, slot):
        return self.kept[slot].tobytes() if self.slots is None else super().read_back(slot)

    def close(self):
        if self.slots is not None:
            self.kept = self.slots
        super().close()


alloc_slot_store = allocates(Store)
