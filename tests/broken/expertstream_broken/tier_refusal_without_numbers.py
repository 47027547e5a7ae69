"""Host slots that cannot be had are refused without the bytes asked for."""

from expertstream import DeviceOutOfMemory, hookimpl
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def alloc_host_slots(store, slot_count):
    try:
        return Rows(store, slot_count)
    except (MemoryError, ValueError) as error:
        raise DeviceOutOfMemory("the host tier does not fit; ask for less") from error
