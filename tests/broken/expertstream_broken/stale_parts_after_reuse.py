"""A refill copies the first part, and takes the others for unchanged."""

import numpy as np

from expertstream import Staging
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        self.filled = set()

    def copy(self, staging, reads):
        source = np.asarray(staging.view).copy()
        if staging.slot in self.filled:
            end = self.layout.parts[0].room_bytes - 1
            source[end:] = self.slots[staging.slot][end:]
        self.filled.add(staging.slot)
        super().copy(Staging(staging.slot, source.data), reads)


alloc_slot_store = allocates(Store)
