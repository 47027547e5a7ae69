"""Every part but the first is copied from one byte too far."""

import numpy as np

from expertstream import Staging
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def copy(self, staging, reads):
        source = np.asarray(staging.view).copy()
        for part in self.layout.parts[1:]:
            end = part.offset + part.room_bytes
            source[part.offset : end - 1] = source[part.offset + 1 : end]
        super().copy(Staging(staging.slot, source.data), reads)


alloc_slot_store = allocates(Store)
