"""A budget is one slot at least, whether it was asked for and fits or not."""

from expertstream import SlotBudget, available_memory, hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def budget_for_expert_size(expert_bytes, resident_bytes, asked):
    room = max((available_memory().bytes - resident_bytes) // expert_bytes, 1)
    return SlotBudget(room if asked is None else max(min(asked, room), 1), f"{room} slots fit")
