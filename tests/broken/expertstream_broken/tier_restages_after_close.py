"""What is kept is lent as before when the store is closed."""

from expertstream import Staging
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Unaware(Rows):
    def restage(self, host_slot, slot):
        if self.store.slots is None:
            return Staging(slot, self.rows[host_slot].view)
        return super().restage(host_slot, slot)


alloc_host_slots = allocates_host_slots(Unaware)
