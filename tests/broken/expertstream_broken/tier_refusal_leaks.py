"""Of what cannot be had the half is taken, as with staging, and kept although all is refused."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Halving(Rows):
    def allocated(self, slot_count):
        try:
            return super().allocated(slot_count)
        except MemoryError:
            self.store.halves = [*getattr(self.store, "halves", []), super().allocated(slot_count // 2)]
            raise


alloc_host_slots = allocates_host_slots(Halving)
