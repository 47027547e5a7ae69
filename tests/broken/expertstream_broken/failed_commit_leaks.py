"""The staging of a commit that failed is never lent again."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def end_lease(self, staging, error):
        if error is None:
            super().end_lease(staging, error)


alloc_slot_store = allocates(Store)
