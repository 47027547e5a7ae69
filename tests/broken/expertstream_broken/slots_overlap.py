"""Each slot begins one page before the one in front of it ends."""

from expertstream_fakedevice import aligned_rows
from numpy.lib.stride_tricks import as_strided

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


PAGE_BYTES = 4096


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        stride = max(layout.slot_bytes - PAGE_BYTES, PAGE_BYTES)
        pages = aligned_rows((slot_count + 1) * layout.slot_bytes // PAGE_BYTES, PAGE_BYTES, layout.alignment).base
        self.slots = as_strided(pages, (slot_count, layout.slot_bytes), (stride, 1))


alloc_slot_store = allocates(Store)
