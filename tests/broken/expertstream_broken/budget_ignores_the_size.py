"""A budget counts slots of a fixed size, whatever was asked about."""

from expertstream import SlotBudget, available_memory, hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def budget_for_expert_size(expert_bytes, resident_bytes, asked):
    room = max(available_memory().bytes - resident_bytes, 0) >> 20
    return SlotBudget(room if asked is None else min(asked, room), f"{room} slots fit")
