"""Not broken: staging is the slot itself, read by kernels on streams."""

from expertstream import hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not replaced here
from expertstream_broken.sound import InPlaceStore, allocates

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def host_memory_is_device_addressable():
    return True


alloc_slot_store = allocates(InPlaceStore)
