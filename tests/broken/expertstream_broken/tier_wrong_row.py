"""What is kept in the last host slot goes to the first one: the index is taken modulo one too few."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Misplacing(Rows):
    def keep(self, slot, host_slot):
        self.row(host_slot, slot)  # refuses what does not exist
        super().keep(slot, host_slot % max(self.slot_count - 1, 1))


alloc_host_slots = allocates_host_slots(Misplacing)
