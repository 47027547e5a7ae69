"""The staging of a commit is never lent again where its slot was the first."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def end_lease(self, staging, error):
        if staging.slot != 0:
            super().end_lease(staging, error)


alloc_slot_store = allocates(Store)
