"""Eight threads that fill slots at once, as the core's do."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from expertstream import ExpertKey
from expertstream.conformance.experts import expert_bytes
from expertstream.conformance.slots_under_test import SlotsUnderTest

FILLERS = 8
SLOTS_FILLED = 2 * FILLERS
"""Each filler has two slots of its own and fills them in turn."""


def fill_at_once(slots: SlotsUnderTest, rounds: int) -> list[str]:
    """Fill each filler's slots `rounds` times, part by part; what was wrong, right after a commit or in the end."""
    together = Barrier(FILLERS)
    layout = slots.store.layout

    def fill(filler: int) -> list[str]:
        together.wait()
        wrongs = []
        for number in range(rounds):
            slot, key = _filled(filler, number)
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
        wrongs = [wrong for wrongs in fillers.map(fill, range(FILLERS)) for wrong in wrongs]
    in_the_end = [_filled(filler, number) for filler in range(FILLERS) for number in range(max(rounds - 2, 0), rounds)]
    wrongs += [slots.wrong(slot, key) for slot, key in in_the_end]
    return [wrong for wrong in wrongs if wrong]


def _filled(filler: int, number: int) -> tuple[int, ExpertKey]:
    """The slot of a filler's turn, and the expert that goes there."""
    return filler + FILLERS * (number % 2), ExpertKey(filler, number % 4)
