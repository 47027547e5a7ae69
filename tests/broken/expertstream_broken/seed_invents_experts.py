"""Experts that are not in the list fill the slots that are left over."""

from expertstream import ExpertKey, hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def seed_experts(hottest, slot_count):
    seeds = list(hottest[:slot_count])
    if hottest and len(seeds) < slot_count:
        seeds.append(ExpertKey(max(key.layer for key in hottest) + 1, 0))
    return seeds
