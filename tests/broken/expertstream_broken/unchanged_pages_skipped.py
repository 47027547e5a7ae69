"""A refill copies only the pages whose first 64 bytes have changed."""

import numpy as np

from expertstream import Staging
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


PAGE_BYTES = 4096


class Store(LateStore):
    def copy(self, staging, reads):
        old = self.slots[staging.slot].reshape(-1, PAGE_BYTES)
        new = np.asarray(staging.view).reshape(-1, PAGE_BYTES)
        changed = (old[:, :64] != new[:, :64]).any(axis=1)
        merged = np.where(changed[:, None], new, old)
        super().copy(Staging(staging.slot, merged.reshape(-1).data), reads)


alloc_slot_store = allocates(Store)
