"""A staging buffer is idle again as soon as its copy has been asked for."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def commit(self, staging):
        commit = super().commit(staging)
        super().discard(staging)
        return commit

    def end_lease(self, staging, error):
        pass  # not once more when the copy has ended


alloc_slot_store = allocates(Store)
