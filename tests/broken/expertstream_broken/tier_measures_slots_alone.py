"""The host slots do not count in what a store takes."""

from expertstream import StoreMemory, hookimpl
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def measure_store(store):
    slot_bytes = store.layout.slot_bytes
    return StoreMemory(store.slot_count * slot_bytes, store.staging_count * slot_bytes)
