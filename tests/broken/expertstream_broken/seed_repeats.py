"""The hottest expert is named once for every slot."""

from expertstream import hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def seed_experts(hottest, slot_count):
    return [hottest[0]] * min(slot_count, len(hottest)) if hottest else []
