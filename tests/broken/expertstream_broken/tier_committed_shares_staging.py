"""A host slot that was committed is staging for whoever comes next."""

from expertstream_broken.sound import LateStore, allocates
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import TieredStore

EXPERTSTREAM_CONTRACT = 1


class Store(TieredStore):
    def end_lease(self, staging, error):
        LateStore.discard(self, staging)


alloc_slot_store = allocates(Store)
