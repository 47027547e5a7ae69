"""The last slot's bytes go to the first slot: the index is taken modulo one too few."""

from expertstream import Staging
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def copy(self, staging, reads):
        super().copy(Staging(staging.slot % max(self.slot_count - 1, 1), staging.view), reads)


alloc_slot_store = allocates(Store)
