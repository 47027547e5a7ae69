"""Work launched after order_before does not wait for the copy of kept bytes."""

from expertstream import Staging
from expertstream_broken.sound import allocates
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, TieredStore, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Kept(Staging):
    """A lease of kept bytes, which the store tells from others by its class."""


class Telling(Rows):
    def restage(self, host_slot, slot):
        return Kept(slot, super().restage(host_slot, slot).view)


class Store(TieredStore):
    def commit(self, staging):
        commit = super().commit(staging)
        if isinstance(staging, Kept):
            commit.order_before = lambda stream: None
        return commit


alloc_slot_store = allocates(Store)
alloc_host_slots = allocates_host_slots(Telling)
