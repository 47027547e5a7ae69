"""A host slot is lent to be filled before `keep` has filled it: only copies out of it are waited for."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class LentUnderKeep(Rows):
    def keep(self, slot, host_slot):
        row = self.row(host_slot, slot)
        self.store.launch("copies", self.take_over, slot, row)


alloc_host_slots = allocates_host_slots(LentUnderKeep)
