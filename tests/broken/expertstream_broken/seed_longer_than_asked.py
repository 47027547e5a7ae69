"""Every hot expert is named, whether there is a slot for it or not."""

from expertstream import hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def seed_experts(hottest, slot_count):
    return list(hottest)
