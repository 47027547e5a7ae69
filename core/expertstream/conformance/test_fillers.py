"""Eight threads fill slots at once, as the core's do, and no commit is lost, mixed up or misplaced."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from expertstream import ExpertKey, SlotLayout
from expertstream.conformance.experts import LARGE, SMALL, expert_bytes
from expertstream.conformance.plugin import OpenSlots

FILLERS = 8


@pytest.mark.hook("commit_slot")
@pytest.mark.parametrize(("layout", "rounds"), [(SMALL, 12), (LARGE, 2)], ids=["small", "large"])
def test_eight_fillers_at_once_lose_no_commit(open_slots: OpenSlots, layout: SlotLayout, rounds: int) -> None:
    slots = open_slots(layout, 2 * FILLERS)
    together = Barrier(FILLERS)

    def fill(filler: int) -> list[str]:
        together.wait()
        wrongs = []
        for number in range(rounds):
            slot, key = filler + FILLERS * (number % 2), ExpertKey(filler, number % 4)
            staging = slots.store.stage(slot)
            expected = expert_bytes(layout, key)
            for part in layout.parts:
                end = part.offset + part.room_bytes
                staging.view[part.offset : end] = expected[part.offset : end]
                time.sleep(0)  # another thread's turn
            commit = slots.backend.commit_slot(slots.store, staging)
            time.sleep(0)
            commit.wait()
            wrongs.append(slots.wrong(slot, key))
        return wrongs

    with ThreadPoolExecutor(FILLERS) as fillers:
        assert list(fillers.map(fill, range(FILLERS))) == [[""] * rounds] * FILLERS
    for filler in range(FILLERS):
        for number in range(rounds - 2, rounds):
            assert not slots.wrong(filler + FILLERS * (number % 2), ExpertKey(filler, number % 4))


@pytest.mark.hook("commit_slot", "alloc_slot_store")
def test_eight_fillers_that_discard_and_commit_leave_the_committed_experts(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, FILLERS)
    together = Barrier(FILLERS)

    def fill(filler: int) -> None:
        together.wait()
        for number in range(12):
            if (number + filler) % 3 == 0:
                slots.scribble(filler)
            slots.load(filler, ExpertKey(filler, number))

    with ThreadPoolExecutor(FILLERS) as fillers:
        list(fillers.map(fill, range(FILLERS)))
    assert [slots.wrong(filler, ExpertKey(filler, 11)) for filler in range(FILLERS)] == [""] * FILLERS
