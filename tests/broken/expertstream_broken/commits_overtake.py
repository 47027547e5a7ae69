"""Copies take turns between two queues, and one of the two is slow: a later commit of a slot may land first."""

import itertools
import time

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count, staging_count=4)
        self.turns = itertools.count()

    def launch(self, stream, work, *arguments):
        if stream == "copies" and next(self.turns) % 2:
            return super().launch("more copies", self.slowly, work, *arguments)
        return super().launch(stream, work, *arguments)

    def slowly(self, work, *arguments):
        time.sleep(0.02)
        return work(*arguments)


alloc_slot_store = allocates(Store)
