"""Slots that a device takes without a copy."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from expertstream import SlotLayout
from expertstream.conformance.experts import ONE_PAGE, SMALL
from expertstream.conformance.plugin import OpenSlots


@pytest.mark.hook("alloc_slot_store")
@pytest.mark.parametrize("layout", [ONE_PAGE, SMALL], ids=["one page", "small"])
def test_a_slot_has_whole_pages_for_itself(open_slots: OpenSlots, layout: SlotLayout) -> None:
    store = open_slots(layout, 5).store
    addresses = [np.frombuffer(store.stage(slot).view, np.uint8).ctypes.data for slot in range(5)]
    assert [address % mmap.PAGESIZE for address in addresses] == [0] * 5
    strides = np.diff(addresses)
    assert (strides >= layout.slot_bytes).all()
    assert not (strides % mmap.PAGESIZE).any()
