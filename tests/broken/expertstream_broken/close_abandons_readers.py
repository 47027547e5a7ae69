"""Closing takes the memory away from kernels that still read it."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def close(self):
        if "copies" in self.streams:
            self.streams["copies"].shutdown()
        self.slots = None
        super().close()


alloc_slot_store = allocates(Store)
