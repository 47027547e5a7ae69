"""Slots and staging are aligned to a page, whatever alignment the layout asks for."""

from expertstream_fakedevice import aligned_rows

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        self.slots = aligned_rows(slot_count, layout.slot_bytes, 4096)


alloc_slot_store = allocates(Store)
