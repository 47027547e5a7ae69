"""A commit that fails says so, gives its staging back, and leaves everything else as it was."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from expertstream import CommitFailed, ExpertKey
from expertstream.conformance.experts import SMALL
from expertstream.conformance.plugin import BreakNextCommit, LaunchRead, OpenSlots


@pytest.mark.hook("commit_slot")
def test_a_commit_that_failed_says_so(open_slots: OpenSlots, break_next_commit: BreakNextCommit) -> None:
    slots = open_slots(SMALL, 2)
    break_next_commit(slots.store)
    with pytest.raises(CommitFailed):
        slots.load(0, ExpertKey(1, 0))


@pytest.mark.hook("commit_slot")
def test_a_commit_that_failed_is_never_done(open_slots: OpenSlots, break_next_commit: BreakNextCommit) -> None:
    slots = open_slots(SMALL, 2)
    break_next_commit(slots.store)

    def commit_and_ask_until_it_is_known() -> None:
        commit = slots.commit(0, ExpertKey(1, 0))
        while not commit.done():
            time.sleep(0)  # another thread's turn

    with pytest.raises(CommitFailed):
        commit_and_ask_until_it_is_known()


@pytest.mark.hook("commit_slot")
@pytest.mark.parametrize("asked_by", ["wait", "done"])
def test_nothing_is_ordered_after_a_commit_that_is_known_to_have_failed(
    open_slots: OpenSlots, break_next_commit: BreakNextCommit, streams: Sequence[int], asked_by: str
) -> None:
    slots = open_slots(SMALL, 2)
    break_next_commit(slots.store)
    try:
        commit = slots.commit(0, ExpertKey(1, 0))
    except CommitFailed:
        pytest.skip(f"backend {slots.backend.name!r}: commit_slot itself tells of the failure, so there is no Commit")

    def ask_until_it_is_known() -> None:
        if asked_by == "wait":
            commit.wait()
        while not commit.done():
            time.sleep(0)  # another thread's turn

    with pytest.raises(CommitFailed):
        ask_until_it_is_known()
    for stream in streams:
        with pytest.raises(CommitFailed):
            commit.order_before(stream)


@pytest.mark.hook("commit_slot")
def test_a_commit_that_failed_gives_its_staging_back(open_slots: OpenSlots, break_next_commit: BreakNextCommit) -> None:
    slots = open_slots(SMALL, 2)
    for expert in range(40):
        break_next_commit(slots.store)
        with pytest.raises(CommitFailed):
            slots.load(0, ExpertKey(1, expert))
    slots.load(0, ExpertKey(2, 0))
    assert not slots.wrong(0, ExpertKey(2, 0))


@pytest.mark.hook("commit_slot")
def test_a_commit_that_failed_leaves_other_slots_alone(
    open_slots: OpenSlots, break_next_commit: BreakNextCommit
) -> None:
    slots = open_slots(SMALL, 3)
    for slot in range(3):
        slots.load(slot, ExpertKey(3, slot))
    break_next_commit(slots.store)
    with pytest.raises(CommitFailed):
        slots.load(1, ExpertKey(4, 1))
    assert not slots.wrong(0, ExpertKey(3, 0))
    assert not slots.wrong(2, ExpertKey(3, 2))


@pytest.mark.hook("commit_slot")
def test_a_stream_goes_on_after_a_commit_that_failed(
    open_slots: OpenSlots, break_next_commit: BreakNextCommit, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    slots = open_slots(SMALL, 2)
    slots.load(1, ExpertKey(5, 1))
    break_next_commit(slots.store)

    def commit_and_order() -> None:
        commit = slots.commit(0, ExpertKey(5, 0))
        commit.order_before(streams[0])
        commit.wait()

    with pytest.raises(CommitFailed):
        commit_and_order()
    assert not slots.wrong_bytes(launch_read(slots.store, 1, streams[0], 0)(), ExpertKey(5, 1))
