"""Host slots begin 64 bytes into a page."""

from expertstream_fakedevice import aligned_rows

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Misaligned(Rows):
    def allocated(self, slot_count):
        slot_bytes, alignment = self.store.layout.slot_bytes, self.store.layout.alignment
        return [row[64:][:slot_bytes] for row in aligned_rows(slot_count, slot_bytes + 64, alignment)]


alloc_host_slots = allocates_host_slots(Misaligned)
