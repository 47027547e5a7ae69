"""A budget tells of one staging buffer, and the store takes two."""

from attrs import evolve

from expertstream import hookimpl
from expertstream_broken import sound_tiered
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def budget_for_expert_size(expert_bytes, resident_bytes, asked):
    budget = sound_tiered.budget_for_expert_size(expert_bytes, resident_bytes, asked)
    return evolve(budget, staging_bytes=expert_bytes)
