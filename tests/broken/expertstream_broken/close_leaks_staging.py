"""A record of commits, kept for debugging, keeps the staging buffers of stores that are closed."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


COMMITTED = []


class Store(LateStore):
    def commit(self, staging):
        COMMITTED.append(staging)
        return super().commit(staging)


alloc_slot_store = allocates(Store)
