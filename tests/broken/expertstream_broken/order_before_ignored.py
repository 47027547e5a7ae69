"""Work launched after order_before does not wait for the copy."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def commit(self, staging):
        commit = super().commit(staging)
        commit.order_before = lambda stream: None
        return commit


alloc_slot_store = allocates(Store)
