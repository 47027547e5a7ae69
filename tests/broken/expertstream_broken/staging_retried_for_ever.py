"""Where there is no memory for one staging buffer, it is asked for again and again."""

import time

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        while True:
            try:
                return super().__init__(layout, slot_count)
            except MemoryError:
                if not hasattr(self, "slots"):  # of the slots' memory, which was not had either
                    raise
                time.sleep(0.01)


alloc_slot_store = allocates(Store)
