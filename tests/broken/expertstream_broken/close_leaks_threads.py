"""Closing waits for the streams, and leaves a thread of its own running."""

import threading

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


alloc_slot_store = allocates(Store)
