"""Copies are made in units of 8 KiB, and what is left over is forgotten."""

import numpy as np

from expertstream import Staging
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


UNIT_BYTES = 8 << 10


class Store(LateStore):
    def copy(self, staging, reads):
        whole_bytes = self.layout.slot_bytes // UNIT_BYTES * UNIT_BYTES
        source = self.slots[staging.slot].copy()
        source[:whole_bytes] = np.asarray(staging.view)[:whole_bytes]
        super().copy(Staging(staging.slot, source.data), reads)


alloc_slot_store = allocates(Store)
