"""A slot counted from the end is taken for a slot."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def device_view(self, slot):
        return super().device_view(slot + self.slot_count if slot < 0 else slot)


alloc_slot_store = allocates(Store)
