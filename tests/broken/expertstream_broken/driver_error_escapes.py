"""What the memory allocator raises is passed on as it is."""

from expertstream import hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def alloc_slot_store(layout, slot_count):
    return LateStore(layout, slot_count)
