"""A closed store frees its slots and its staging, and the pieces of its tier stay."""

from expertstream_broken.sound import LateStore, allocates
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import TieredStore

EXPERTSTREAM_CONTRACT = 1


class Store(TieredStore):
    def close(self):
        LateStore.close(self)


alloc_slot_store = allocates(Store)
