"""A store that was refused host slots once gets none at all any more."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Discouraged(Rows):
    def allocated(self, slot_count):
        if getattr(self.store, "is_refused", False):
            raise MemoryError("there was no memory before")
        self.store.is_refused = True
        rows = super().allocated(slot_count)
        self.store.is_refused = False
        return rows


alloc_host_slots = allocates_host_slots(Discouraged)
