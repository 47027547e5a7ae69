"""The host waits in keep for the kernels that read the slot."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class Waiting(Rows):
    def keep(self, slot, host_slot):
        for event in self.store.reads.get(slot, {}).values():
            event.result()
        super().keep(slot, host_slot)


alloc_host_slots = allocates_host_slots(Waiting)
