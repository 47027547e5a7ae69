"""A commit says that it is done as soon as its copy has been asked for."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def commit(self, staging):
        commit = super().commit(staging)
        commit.done = lambda: True
        return commit


alloc_slot_store = allocates(Store)
