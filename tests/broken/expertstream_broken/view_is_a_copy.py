"""A view is a copy of the slot as it was when the view was asked for."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def device_view(self, slot):
        return super().device_view(slot).copy()


alloc_slot_store = allocates(Store)
