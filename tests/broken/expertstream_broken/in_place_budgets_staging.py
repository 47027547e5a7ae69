"""The budget tells of staging buffers, although staging is the slot."""

from expertstream_broken import sound
from expertstream_broken.sound_in_place import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1

budget_for_expert_size = sound.budget_for_expert_size
