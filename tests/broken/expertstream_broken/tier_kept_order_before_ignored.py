"""Work launched after order_before does not wait for the copy of kept bytes."""

from expertstream_broken.sound import allocates
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Kept, TieredStore

EXPERTSTREAM_CONTRACT = 1


class Store(TieredStore):
    def commit(self, staging):
        commit = super().commit(staging)
        if isinstance(staging, Kept):
            commit.order_before = lambda stream: None
        return commit


alloc_slot_store = allocates(Store)
