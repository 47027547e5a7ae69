"""Stores are what was asked for, and apart from each other."""

from __future__ import annotations

import numpy as np
import pytest

from expertstream import Backend, ExpertKey, SlotLayout
from expertstream.conformance.experts import LARGE, SMALL, layout_of_pages
from expertstream.conformance.plugin import OpenSlots
from expertstream.conformance.slots_under_test import host_array


@pytest.mark.hook("alloc_slot_store")
@pytest.mark.parametrize("slot_count", [1, 5])
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_a_store_has_the_layout_and_the_slots_asked_for(
    open_slots: OpenSlots, layout: SlotLayout, slot_count: int
) -> None:
    store = open_slots(layout, slot_count).store
    assert store.layout == layout
    assert store.slot_count == slot_count


@pytest.mark.hook("alloc_slot_store")
def test_slots_do_not_overlap(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 7)
    for slot in (3, 0, 6, 2, 5, 1, 4):
        slots.load(slot, ExpertKey(1, slot))
    assert [slots.wrong(slot, ExpertKey(1, slot)) for slot in range(7)] == [""] * 7


@pytest.mark.hook("alloc_slot_store")
@pytest.mark.parametrize("alignment", [4096, 16384])
def test_slots_and_staging_are_aligned(open_slots: OpenSlots, alignment: int) -> None:
    slots = open_slots(layout_of_pages(3, 2, alignment=alignment), 5)
    for slot in range(5):
        staging = slots.store.stage(slot)
        assert np.frombuffer(staging.view, np.uint8).ctypes.data % alignment == 0, "staging"
        slots.store.discard(staging)
        view = host_array(slots.store.device_view(slot))
        assert view is None or view.ctypes.data % alignment == 0, "slot"


@pytest.mark.hook("alloc_slot_store")
def test_two_stores_keep_apart(open_slots: OpenSlots) -> None:
    first, second = open_slots(SMALL, 3), open_slots(layout_of_pages(2, 7), 3)
    for slot in range(3):
        first.load(slot, ExpertKey(1, slot))
        second.load(slot, ExpertKey(2, slot))
    for slot in range(3):
        assert not first.wrong(slot, ExpertKey(1, slot))
        assert not second.wrong(slot, ExpertKey(2, slot))


@pytest.mark.hook("alloc_slot_store")
def test_a_store_outlives_another(backend: Backend, open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 3)
    slots.load(1, ExpertKey(1, 1))
    open_slots(SMALL, 3).store.close()
    assert not slots.wrong(1, ExpertKey(1, 1))
    slots.load(1, ExpertKey(1, 2))
    assert not slots.wrong(1, ExpertKey(1, 2))
