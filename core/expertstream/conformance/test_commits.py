"""What kernels read in a slot is what was committed there, from the moment at which the commit says so."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from expertstream import Commit, ExpertKey, SlotLayout
from expertstream.conformance.experts import LARGE, LAYOUTS, SMALL, expert_bytes
from expertstream.conformance.plugin import OpenSlots

EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.mark.hook("commit_slot")
def test_a_commit_is_answered_with_a_commit(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 1)
    commit = slots.backend.hooks.commit_slot(store=slots.store, staging=slots.store.stage(0))
    assert isinstance(commit, Commit)
    commit.wait()


@pytest.mark.hook("commit_slot")
@EVERY_LAYOUT
def test_kernels_read_the_bytes_that_were_committed(open_slots: OpenSlots, layout: SlotLayout) -> None:
    slots = open_slots(layout, 3)
    for expert in range(12):
        key = ExpertKey(2, expert)
        slots.load(expert % 3, key)
        assert not slots.wrong(expert % 3, key)


@pytest.mark.hook("commit_slot")
@EVERY_LAYOUT
def test_a_commit_that_is_done_shows_its_bytes(open_slots: OpenSlots, layout: SlotLayout) -> None:
    slots = open_slots(layout, 3)
    for expert in range(12):
        key = ExpertKey(3, expert)
        commit = slots.commit(expert % 3, key)
        while not commit.done():
            time.sleep(0)  # another thread's turn
        assert not slots.wrong(expert % 3, key)


@pytest.mark.hook("commit_slot")
def test_a_commit_that_was_waited_for_is_done_and_stays_so(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 1)
    commit = slots.commit(0, ExpertKey(0, 1))
    for _ in range(3):
        commit.wait()
        assert commit.done() is True


@pytest.mark.hook("commit_slot")
def test_any_thread_may_wait_for_a_commit(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 2)

    def wait_and_compare(commit: Commit, slot: int, key: ExpertKey) -> str:
        commit.wait()
        return slots.wrong(slot, key) if commit.done() else "waited for, and not done"

    with ThreadPoolExecutor(4) as threads:
        for expert in range(8):
            key = ExpertKey(4, expert)
            commit = slots.commit(expert % 2, key)
            answers = [threads.submit(wait_and_compare, commit, expert % 2, key) for _ in range(4)]
            assert [answer.result() for answer in answers] == [""] * 4


@pytest.mark.hook("commit_slot")
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_each_slot_holds_its_own_expert(open_slots: OpenSlots, layout: SlotLayout) -> None:
    slots = open_slots(layout, 6)
    commits = [slots.commit(slot, ExpertKey(5, slot)) for slot in range(6)]  # more than there are staging buffers
    for commit in reversed(commits):
        commit.wait()
    assert [slots.wrong(slot, ExpertKey(5, slot)) for slot in range(6)] == [""] * 6


@pytest.mark.hook("commit_slot")
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_parts_that_are_not_whole_pages_arrive_at_their_own_offsets(open_slots: OpenSlots, layout: SlotLayout) -> None:
    slots = open_slots(layout, 2)
    for expert, (shift, short) in enumerate([(0, 1), (32, 4000), (1312, 77), (4064, 31)]):
        expected = expert_bytes(layout, ExpertKey(6, expert))
        # Only the experts' own bytes are written, as a reader does: what lies around them in the room is undefined.
        spans = [slice(part.offset + shift, part.offset + part.room_bytes - short) for part in layout.parts]
        spans = [span for span in spans if span.start < span.stop]
        staging = slots.store.stage(expert % 2)
        for span in spans:
            staging.view[span] = expected[span]
        slots.backend.commit_slot(slots.store, staging).wait()
        found = slots.store.read_back(expert % 2)
        assert [found[span] == expected[span] for span in spans] == [True] * len(spans)


@pytest.mark.hook("commit_slot")
@EVERY_LAYOUT
@pytest.mark.parametrize("refill_count", [3, 6])
def test_refills_of_one_slot_land_in_the_order_of_their_commits(
    open_slots: OpenSlots, layout: SlotLayout, refill_count: int
) -> None:
    slots = open_slots(layout, 2)
    for first in range(3):
        experts = range(first, first + refill_count)
        commits = [slots.commit(0, ExpertKey(9, expert)) for expert in experts]
        commits[-1].wait()
        assert not slots.wrong(0, ExpertKey(9, experts[-1])), "what is there after the last commit"
        for commit in commits:
            commit.wait()
        assert not slots.wrong(0, ExpertKey(9, experts[-1])), "what is there after all commits"


@pytest.mark.hook("commit_slot")
@EVERY_LAYOUT
def test_a_refill_leaves_no_stale_bytes(open_slots: OpenSlots, layout: SlotLayout) -> None:
    slots = open_slots(layout, 2)
    slots.load(1, ExpertKey(7, 99))
    for expert in range(6):
        key = ExpertKey(7, expert % 3)  # an expert that was here before returns
        slots.load(0, key)
        assert not slots.wrong(0, key), "the slot"
    assert not slots.wrong(1, ExpertKey(7, 99)), "a slot beside it"


@pytest.mark.hook("commit_slot")
def test_a_refill_that_differs_in_one_byte_shows_that_byte(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 1)
    slots.load(0, ExpertKey(8, 0))
    for position in (0, 1, SMALL.parts[1].offset + 5, SMALL.slot_bytes - 1):
        expected = bytearray(expert_bytes(SMALL, ExpertKey(8, 0)))
        expected[position] ^= 0xFF
        staging = slots.store.stage(0)
        staging.view[:] = expected
        slots.backend.commit_slot(slots.store, staging).wait()
        assert slots.store.read_back(0) == expected
