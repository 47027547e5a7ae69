"""The store knows one piece of its tier by name, and takes the host slots of the others for staging."""

from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class OnlyTheLast(Rows):
    def __init__(self, store, slot_count):
        earlier, store.rows = store.rows, {}
        try:
            super().__init__(store, slot_count)
        except BaseException:
            store.rows = earlier
            raise


alloc_host_slots = allocates_host_slots(OnlyTheLast)
