"""To know whether a commit is done, the host waits until it is."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def commit(self, staging):
        commit = super().commit(staging)
        commit.done = lambda: commit.wait() is None
        return commit


alloc_slot_store = allocates(Store)
