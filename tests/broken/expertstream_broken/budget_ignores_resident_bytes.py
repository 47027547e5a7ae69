"""A budget grants the memory that other weights take a second time."""

from expertstream import SlotBudget, available_memory, hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def budget_for_expert_size(expert_bytes, resident_bytes, asked):
    room = available_memory().bytes // expert_bytes
    return SlotBudget(room if asked is None else min(asked, room), f"{room} slots fit")
