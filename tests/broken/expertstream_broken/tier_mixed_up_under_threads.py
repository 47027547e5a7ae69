"""Two host slots asked for at the same time are one: which it is lies in a variable that all threads write."""

import time

from expertstream import Staging
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class OneAtATime(Rows):
    def restage(self, host_slot, slot):
        self.asked = self.row(host_slot, slot)
        time.sleep(0.002)  # the other thread's turn, at the worst moment
        return Staging(slot, self.asked.view)


alloc_host_slots = allocates_host_slots(OneAtATime)
