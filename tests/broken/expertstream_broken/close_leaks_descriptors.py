"""Each store opens the device's file, and closing leaves it open."""

import os

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        os.open(os.devnull, os.O_RDWR)


alloc_slot_store = allocates(Store)
