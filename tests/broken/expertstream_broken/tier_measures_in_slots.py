"""What a store takes is given in slots."""

from expertstream import StoreMemory, hookimpl
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def measure_store(store):
    return StoreMemory(store.slot_count, store.staging_count + len(store.rows))
