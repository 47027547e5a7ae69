"""A commit of what a host slot keeps is held to what every commit promises, wherever the kept bytes came from."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from expertstream import CommitFailed, ExpertKey, SlotLayout
from expertstream.conformance.experts import LARGE, SMALL
from expertstream.conformance.plugin import BreakNextCommit, LaunchRead, OpenTier
from expertstream.conformance.slots_under_test import HostSlotsUnderTest

BOTH_SIZES = pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
BOTH_WAYS = pytest.mark.parametrize("kept_by", ["commit_slot", "keep"])
READ_MS = 30
SOURCE = 2
"""The slot that experts pass through on their way into a host slot."""


@pytest.mark.hook("alloc_host_slots")
def test_kept_bytes_are_lent_for_the_slot_asked_for(open_tier: OpenTier) -> None:
    tier = open_tier(SMALL, 3, 2)
    for expert, (host_slot, slot) in enumerate([(1, 2), (0, 0), (1, 1), (0, 2), (1, 0)]):
        tier.commit(host_slot, 1, ExpertKey(1, expert)).wait()
        staging = tier.host_slots.restage(host_slot, slot)
        assert staging.slot == slot
        tier.slots.store.discard(staging)


@pytest.mark.hook("alloc_host_slots", "commit_slot")
@BOTH_SIZES
@BOTH_WAYS
def test_a_refill_with_kept_bytes_waits_for_the_reader(
    open_tier: OpenTier, launch_read: LaunchRead, streams: Sequence[int], layout: SlotLayout, kept_by: str
) -> None:
    tier = open_tier(layout, 3, 1)
    slots = tier.slots
    slots.load(0, ExpertKey(2, 0))
    for expert in range(1, 4):
        old, new, stream = ExpertKey(2, expert - 1), ExpertKey(2, expert), streams[expert % len(streams)]
        _have_kept(tier, new, kept_by)
        read = launch_read(slots.store, 0, stream, READ_MS)
        slots.store.mark_read(0, stream)
        commit = tier.recommit(0, 0)
        assert not slots.wrong_bytes(read(), old), "what the reader saw"
        commit.wait()
        assert not slots.wrong(0, new), "what is there after the refill"


@pytest.mark.hook("alloc_host_slots", "commit_slot")
@BOTH_SIZES
@BOTH_WAYS
def test_a_read_ordered_after_a_commit_of_kept_bytes_sees_them(
    open_tier: OpenTier, launch_read: LaunchRead, streams: Sequence[int], layout: SlotLayout, kept_by: str
) -> None:
    tier = open_tier(layout, 3, 1)
    for expert in range(8):
        slot, stream, key = expert % 2, streams[expert % len(streams)], ExpertKey(3, expert)
        _have_kept(tier, key, kept_by)
        commit = tier.recommit(0, slot)
        commit.order_before(stream)
        assert not tier.slots.wrong_bytes(launch_read(tier.slots.store, slot, stream, 0)(), key)


@pytest.mark.hook("alloc_host_slots", "commit_slot")
@BOTH_SIZES
@BOTH_WAYS
def test_a_commit_of_kept_bytes_that_is_done_shows_them(open_tier: OpenTier, layout: SlotLayout, kept_by: str) -> None:
    tier = open_tier(layout, 3, 1)
    for expert in range(8):
        slot, key = expert % 2, ExpertKey(4, expert)
        _have_kept(tier, key, kept_by)
        commit = tier.recommit(0, slot)
        while not commit.done():
            time.sleep(0)  # another thread's turn
        assert not tier.slots.wrong(slot, key)


@pytest.mark.hook("alloc_host_slots", "commit_slot")
@pytest.mark.parametrize("asked_by", ["wait", "done"])
@BOTH_WAYS
def test_a_commit_of_kept_bytes_that_failed_says_so_whatever_is_asked(
    open_tier: OpenTier, break_next_commit: BreakNextCommit, streams: Sequence[int], asked_by: str, kept_by: str
) -> None:
    tier = open_tier(SMALL, 3, 1)
    _have_kept(tier, ExpertKey(5, 0), kept_by)
    break_next_commit(tier.slots.store)
    try:
        commit = tier.recommit(0, 0)
    except CommitFailed:
        return  # commit_slot itself says so, and there is no Commit to ask

    def ask_until_it_is_known() -> None:
        if asked_by == "wait":
            commit.wait()
        while not commit.done():
            time.sleep(0)  # another thread's turn

    with pytest.raises(CommitFailed):
        ask_until_it_is_known()
    with pytest.raises(CommitFailed):
        commit.wait()
    with pytest.raises(CommitFailed):
        commit.done()
    for stream in streams:
        with pytest.raises(CommitFailed):
            commit.order_before(stream)


def _have_kept(tier: HostSlotsUnderTest, key: ExpertKey, kept_by: str) -> None:
    """Have the first host slot keep an expert that was committed from it, or that is on its way there by `keep`."""
    if kept_by == "commit_slot":
        tier.commit(0, SOURCE, key).wait()
    else:
        tier.slots.load(SOURCE, key)
        tier.host_slots.keep(SOURCE, 0)
