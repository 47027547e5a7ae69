"""Eight threads fill slots at once, as the core's do, and no commit is lost, mixed up or misplaced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from expertstream import ExpertKey, SlotLayout
from expertstream.conformance.experts import LARGE, SMALL
from expertstream.conformance.fillers import FILLERS, SLOTS_FILLED, fill_at_once
from expertstream.conformance.plugin import OpenSlots


@pytest.mark.hook("commit_slot")
@pytest.mark.parametrize(("layout", "rounds"), [(SMALL, 12), (LARGE, 2)], ids=["small", "large"])
def test_eight_fillers_at_once_lose_no_commit(open_slots: OpenSlots, layout: SlotLayout, rounds: int) -> None:
    assert not fill_at_once(open_slots(layout, SLOTS_FILLED), rounds)


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
