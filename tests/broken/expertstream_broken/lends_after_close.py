"""A closed store still lends staging."""

from expertstream import Staging
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def stage(self, slot):
        return Staging(slot, self.idle.get().data)


alloc_slot_store = allocates(Store)
