"""An allocation that fails is tried again, and never given up."""

import time

from expertstream import hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def alloc_slot_store(layout, slot_count):
    while True:
        try:
            return LateStore(layout, slot_count)
        except MemoryError:
            time.sleep(0.01)
