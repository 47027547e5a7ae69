"""A commit answers READY while its copy is still under way."""

from expertstream import READY
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def commit(self, staging):
        super().commit(staging)
        return READY


alloc_slot_store = allocates(Store)
