"""Staging begins 64 bytes into a page: fine for copies, not for direct reads."""

from expertstream_fakedevice import aligned_rows

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        for _ in range(self.idle.qsize()):
            self.idle.get()
            self.idle.put(aligned_rows(1, layout.slot_bytes + 64, layout.alignment)[0][64:])


alloc_slot_store = allocates(Store)
