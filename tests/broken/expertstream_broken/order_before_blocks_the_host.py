"""The host waits for the copy where the stream should."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def commit(self, staging):
        commit = super().commit(staging)
        commit.order_before = lambda stream: commit.wait()
        return commit


alloc_slot_store = allocates(Store)
