"""The views that kernels are given show the slot itself, at one place, for as long as the store lives."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from expertstream import Backend, ExpertKey
from expertstream.conformance.experts import LARGE, SMALL, expert_bytes
from expertstream.conformance.plugin import OpenSlots
from expertstream.conformance.slots_under_test import Bytes, SlotsUnderTest, host_array


def host_view(slots: SlotsUnderTest, slot: int) -> Bytes:
    """The slot's view as the host sees it; skips where it does not."""
    view = host_array(slots.store.device_view(slot))
    if view is None:
        pytest.skip(f"backend {slots.backend.name!r}: the host cannot read its views")
    return view


@pytest.mark.hook("alloc_slot_store")
def test_a_view_hands_its_memory_on_through_dlpack(open_slots: OpenSlots) -> None:
    view = open_slots(SMALL, 2).store.device_view(1)
    assert callable(getattr(view, "__dlpack__", None))
    device_type, device_number = view.__dlpack_device__()  # type: ignore[attr-defined]  # views are typed as object
    assert int(device_type) > 0
    assert int(device_number) >= 0


@pytest.mark.hook("describe_device", "alloc_slot_store")
def test_views_are_memory_of_the_type_that_was_described(backend: Backend, open_slots: OpenSlots) -> None:
    described = backend.describe_device().dlpack_type
    stores = [open_slots(layout, 2).store for layout in (SMALL, LARGE)]
    views: list[Any] = [store.device_view(slot) for store in stores for slot in range(2)]
    found = [int(view.__dlpack_device__()[0]) for view in views]
    assert found == [described] * len(views), (
        f"describe_device says dlpack_type {described}; the views say {sorted(set(found))}"
    )
    assert backend.describe_device().dlpack_type == described


@pytest.mark.hook("alloc_slot_store")
@pytest.mark.parametrize("use", ["device_view", "read_back"])
@pytest.mark.parametrize("slot", [-1, 2, 1 << 40])
def test_a_slot_that_does_not_exist_is_not_shown(open_slots: OpenSlots, slot: int, use: str) -> None:
    store = open_slots(SMALL, 2).store
    with pytest.raises(IndexError):
        getattr(store, use)(slot)


@pytest.mark.hook("alloc_slot_store")
def test_a_view_is_the_bytes_of_one_whole_slot(open_slots: OpenSlots) -> None:
    view = host_view(open_slots(SMALL, 2), 1)
    assert view.shape == (SMALL.slot_bytes,)
    assert view.dtype == np.uint8
    assert view.strides == (1,)


@pytest.mark.hook("commit_slot", "alloc_slot_store")
def test_a_view_shows_what_kernels_read(open_slots: OpenSlots) -> None:
    slots = open_slots(LARGE, 2)
    for slot in (1, 0):
        slots.load(slot, ExpertKey(1, slot))
        assert not slots.wrong_bytes(host_view(slots, slot).tobytes(), ExpertKey(1, slot))


@pytest.mark.hook("commit_slot", "alloc_slot_store")
def test_a_view_lives_and_stays_in_place_while_its_slot_is_refilled(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 2)
    views = [host_view(slots, slot) for slot in range(2)]  # as an engine does: once, before anything is loaded
    for expert in range(8):
        slot, key = expert % 2, ExpertKey(2, expert)
        slots.load(slot, key)
        gc.collect()
        assert not slots.wrong_bytes(views[slot].tobytes(), key)
        assert host_view(slots, slot).ctypes.data == views[slot].ctypes.data


@pytest.mark.hook("host_memory_is_device_addressable", "alloc_slot_store")
def test_addressable_staging_is_the_slot_itself(backend: Backend, open_slots: OpenSlots) -> None:
    if not backend.host_memory_is_device_addressable():
        pytest.skip(f"backend {backend.name!r}: host memory is not device addressable")
    slots = open_slots(SMALL, 3)
    for slot in range(3):
        staging = slots.store.stage(slot)
        staging.view[:] = expert_bytes(SMALL, ExpertKey(3, slot))
        backend.commit_slot(slots.store, staging)
        assert np.frombuffer(staging.view, np.uint8).ctypes.data == host_view(slots, slot).ctypes.data
