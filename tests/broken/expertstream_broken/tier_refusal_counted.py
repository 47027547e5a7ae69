"""Host slots are counted before they are there, and stay counted where they are refused."""

from expertstream import StoreMemory, hookimpl
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows, allocates_host_slots

EXPERTSTREAM_CONTRACT = 1


class CountedFirst(Rows):
    def __init__(self, store, slot_count):
        store.counted = getattr(store, "counted", 0) + slot_count
        super().__init__(store, slot_count)


@hookimpl
def measure_store(store):
    slot_bytes = store.layout.slot_bytes
    host_slot_count = getattr(store, "counted", 0)
    return StoreMemory(store.slot_count * slot_bytes, (store.staging_count + host_slot_count) * slot_bytes)


alloc_host_slots = allocates_host_slots(CountedFirst)
