"""Each refill puts the slot into new memory, and views of the old one are dead."""

from expertstream_fakedevice import aligned_rows

from expertstream import Staging
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        self.slots = list(self.slots)

    def copy(self, staging, reads):
        fresh = aligned_rows(1, self.layout.slot_bytes, self.layout.alignment)[0]
        fresh[:] = staging.view
        super().copy(Staging(staging.slot, fresh.data), reads)
        self.slots[staging.slot] = fresh


alloc_slot_store = allocates(Store)
