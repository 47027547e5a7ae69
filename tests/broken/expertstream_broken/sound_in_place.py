"""Not broken: staging is the slot itself, read by kernels on streams."""

from attrs import evolve

from expertstream import hookimpl
from expertstream_broken import sound
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not replaced here
from expertstream_broken.sound import InPlaceStore, allocates

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def host_memory_is_device_addressable():
    return True


@hookimpl
def budget_for_expert_size(expert_bytes, resident_bytes, asked):
    budget = sound.budget_for_expert_size(expert_bytes, resident_bytes, asked)
    return evolve(budget, staging_bytes=0)  # staging is the slot


alloc_slot_store = allocates(InPlaceStore)
