"""Discarded staging is never lent again."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def discard(self, staging):
        pass


alloc_slot_store = allocates(Store)
