"""Which kernels read a slot is kept by the slot's number alone, for all stores together."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1

READS = {}


class Store(LateStore):
    def __init__(self, layout, slot_count):
        super().__init__(layout, slot_count)
        self.reads = READS


alloc_slot_store = allocates(Store)
