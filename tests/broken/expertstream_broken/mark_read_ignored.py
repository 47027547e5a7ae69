"""A slot is refilled under a kernel that still reads it."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def mark_read(self, slot, stream):
        pass


alloc_slot_store = allocates(Store)
