"""The host waits in mark_read for the kernels that it announces."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def mark_read(self, slot, stream):
        self.launch(stream, int).result()


alloc_slot_store = allocates(Store)
