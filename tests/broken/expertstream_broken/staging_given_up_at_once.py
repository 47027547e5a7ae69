"""A store is refused when it cannot have all the staging that it wants."""

from expertstream_fakedevice import DeviceStore

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def __init__(self, layout, slot_count):
        DeviceStore.__init__(self, layout, slot_count, staging_count=2, copy_s=0.004)


alloc_slot_store = allocates(Store)
