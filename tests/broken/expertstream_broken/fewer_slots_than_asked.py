"""A store has one slot less than was asked for, and says nothing."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, max(slot_count - 1, 1))


alloc_slot_store = allocates(Store)
