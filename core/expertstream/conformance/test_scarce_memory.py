"""Where memory is short, a store makes do with less staging, or is refused in words and has taken nothing."""

from __future__ import annotations

import gc
import re
import threading

import pytest

from expertstream import Backend, DeviceOutOfMemory, ExpertKey, SlotLayout, SlotPart
from expertstream.conformance.experts import LARGE, SMALL
from expertstream.conformance.fillers import SLOTS_FILLED, fill_at_once
from expertstream.conformance.holdings import growth, memory_taken
from expertstream.conformance.plugin import OpenSlots, StarveStaging, need_room

TOO_LARGE = SlotLayout((SlotPart("part0", 0, 1 << 40),))
TOO_MANY = 1 << 10
LARGE_SLOTS = 6


@pytest.mark.hook("alloc_slot_store")
def test_memory_that_cannot_be_had_is_refused(backend: Backend) -> None:
    _check_numbers(_refusal(backend, TOO_LARGE, TOO_MANY))


@pytest.mark.hook("alloc_slot_store")
def test_a_refused_allocation_leaves_nothing_behind(backend: Backend, open_slots: OpenSlots) -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        _refusal(backend, TOO_LARGE, TOO_MANY)
    gc.collect()
    assert set(threading.enumerate()) <= before, "threads are left of stores that were refused"
    slots = open_slots(SMALL, 3)
    slots.load(2, ExpertKey(1, 2))
    assert not slots.wrong(2, ExpertKey(1, 2))


@pytest.mark.hook("alloc_slot_store")
def test_a_store_makes_do_with_the_staging_that_can_be_had(
    open_slots: OpenSlots, starve_staging: StarveStaging
) -> None:
    starve_staging(SMALL, 1)
    slots = open_slots(SMALL, SLOTS_FILLED)
    assert slots.store.layout == SMALL
    assert slots.store.slot_count == SLOTS_FILLED
    for slot in range(3):
        slots.scribble(slot)
    assert not fill_at_once(slots, 4)


@pytest.mark.hook("alloc_slot_store")
def test_a_store_that_can_have_no_staging_is_refused(backend: Backend, starve_staging: StarveStaging) -> None:
    starve_staging(SMALL, 0)
    _check_numbers(_refusal(backend, SMALL, 3))


@pytest.mark.hook("alloc_slot_store")
def test_a_store_that_can_have_no_staging_gives_its_slots_back(backend: Backend, starve_staging: StarveStaging) -> None:
    need_room(backend, LARGE, LARGE_SLOTS)
    memories = memory_taken(backend)
    if not memories:
        pytest.skip(f"the system does not tell a process's memory, nor backend {backend.name!r} the device's")
    starve_staging(LARGE, 0)
    before = set(threading.enumerate())
    store_bytes = LARGE_SLOTS * LARGE.slot_bytes
    assert not growth(
        memories,
        f"a store of {store_bytes} bytes was refused for want of staging",
        lambda: _refusal(backend, LARGE, LARGE_SLOTS),
        times=16,
        allowed_bytes=8 * store_bytes,
    )
    assert set(threading.enumerate()) <= before, "threads are left of stores that were refused"


def _refusal(backend: Backend, layout: SlotLayout, slot_count: int) -> str:
    """What the backend says to a store that it cannot make."""
    with pytest.raises(DeviceOutOfMemory) as refusal:
        backend.alloc_slot_store(layout, slot_count)
    return str(refusal.value)


def _check_numbers(refusal: str) -> None:
    numbers = re.findall(r"\d+", re.sub(r"(?<=\d)[,_](?=\d)", "", refusal))
    assert len(numbers) >= 2, f"the message lacks the bytes asked for or the bytes free: {refusal}"
