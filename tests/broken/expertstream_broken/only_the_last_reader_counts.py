"""A slot remembers one reader, and forgets the ones on other streams."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def mark_read(self, slot, stream):
        self.reads.pop(slot, None)
        super().mark_read(slot, stream)


alloc_slot_store = allocates(Store)
