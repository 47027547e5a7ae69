"""A commit of kept bytes says that it is done as soon as its copy has been asked for."""

from expertstream_broken.sound import allocates
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Kept, TieredStore

EXPERTSTREAM_CONTRACT = 1


class Store(TieredStore):
    def commit(self, staging):
        commit = super().commit(staging)
        if isinstance(staging, Kept):
            commit.done = lambda: True
        return commit


alloc_slot_store = allocates(Store)
