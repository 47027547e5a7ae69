"""Two commits at the same time both write the list of what is to be copied, and one of them is lost."""

import time

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count, staging_count=8)
        self.waiting = []

    def commit(self, staging):
        waiting = list(self.waiting)
        time.sleep(0.002)  # the other thread's turn, at the worst moment
        self.waiting = [*waiting, staging]
        return super().commit(staging)

    def copy(self, staging, reads):
        waiting, self.waiting = self.waiting, []
        if staging in waiting:
            super().copy(staging, reads)
        self.waiting = [other for other in waiting if other is not staging] + self.waiting


alloc_slot_store = allocates(Store)
