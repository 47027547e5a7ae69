"""The event is recorded after the first 256 KiB: the rest of a large copy is still under way."""

import time

import numpy as np

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


CHUNK_BYTES = 256 << 10


class Store(LateStore):
    def copy(self, staging, reads):
        for event in reads.values():
            event.result()
        whole = bytes(staging.view)
        self.launch("rest", self._copy_rest, staging.slot, whole)
        self.slots[staging.slot][:CHUNK_BYTES] = np.frombuffer(whole, np.uint8)[:CHUNK_BYTES]

    def _copy_rest(self, slot, whole):
        time.sleep(self.copy_s)
        self.slots[slot][CHUNK_BYTES:] = np.frombuffer(whole, np.uint8)[CHUNK_BYTES:]


alloc_slot_store = allocates(Store)
