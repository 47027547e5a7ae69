"""Staging that is the slot itself is lent while a kernel still reads the slot."""

from expertstream import hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import InPlaceStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(InPlaceStore):
    def mark_read(self, slot, stream):
        pass


@hookimpl
def host_memory_is_device_addressable():
    return True


alloc_slot_store = allocates(Store)
