"""Staging is lent and taken back: whole, one lease at a time, again and again."""

from __future__ import annotations

import pytest

from expertstream import ExpertKey, SlotLayout
from expertstream.conformance.experts import LARGE, SMALL, expert_bytes
from expertstream.conformance.plugin import OpenSlots

MORE_THAN_ANY_BUFFERS = 400


@pytest.mark.hook("alloc_slot_store")
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_staging_is_writable_bytes_for_the_whole_slot_asked_for(open_slots: OpenSlots, layout: SlotLayout) -> None:
    store = open_slots(layout, 3).store
    for slot in (2, 0, 1):
        staging = store.stage(slot)
        assert staging.slot == slot
        view = staging.view
        assert (view.ndim, view.itemsize) == (1, 1), "not single bytes"
        assert len(view) == layout.slot_bytes
        assert not view.readonly
        store.discard(staging)


@pytest.mark.hook("alloc_slot_store")
@pytest.mark.parametrize("slot", [-1, 3, 1 << 40])
def test_a_slot_that_does_not_exist_is_not_staged(open_slots: OpenSlots, slot: int) -> None:
    slots = open_slots(SMALL, 3)
    for _ in range(8):  # and the refusal keeps no staging
        with pytest.raises(IndexError):
            slots.store.stage(slot)
    slots.load(2, ExpertKey(1, 2))
    assert not slots.wrong(2, ExpertKey(1, 2))


@pytest.mark.hook("alloc_slot_store")
def test_discarded_staging_is_lent_again(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 3)
    for count in range(MORE_THAN_ANY_BUFFERS):
        slots.store.discard(slots.store.stage(count % 3))


@pytest.mark.hook("commit_slot")
def test_committed_staging_is_lent_again(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 3)
    for count in range(MORE_THAN_ANY_BUFFERS // 4):
        slots.load(count % 3, ExpertKey(2, count % 5))


@pytest.mark.hook("alloc_slot_store", "commit_slot")
def test_a_slot_is_filled_after_a_discard(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 2)
    for expert in range(6):
        slots.scribble(expert % 2)
        slots.load(expert % 2, ExpertKey(3, expert))
        assert not slots.wrong(expert % 2, ExpertKey(3, expert))


@pytest.mark.hook("alloc_slot_store")
def test_a_discard_leaves_other_slots_alone(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 5)
    for slot in range(5):
        slots.load(slot, ExpertKey(4, slot))
    for _ in range(3):
        slots.scribble(2)
    assert [slots.wrong(slot, ExpertKey(4, slot)) for slot in (0, 1, 3, 4)] == [""] * 4


@pytest.mark.hook("commit_slot")
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_staging_is_not_lent_again_before_its_copy_ended(open_slots: OpenSlots, layout: SlotLayout) -> None:
    slots = open_slots(layout, 5)
    for expert in range(12):
        slot, key = expert % 4, ExpertKey(5, expert)
        commit = slots.commit(slot, key)
        for _ in range(6):  # whatever is lent now, no copy may still read it
            slots.scribble(4)
        commit.wait()
        assert not slots.wrong(slot, key)


@pytest.mark.hook("commit_slot", "alloc_slot_store")
def test_a_lease_is_not_touched_by_other_slots_commits(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 3)
    for expert in range(10):
        commit = slots.commit(0, ExpertKey(6, expert))
        staging = slots.store.stage(1)
        staging.view[:] = expert_bytes(SMALL, ExpertKey(7, expert))
        commit.wait()
        assert staging.view == expert_bytes(SMALL, ExpertKey(7, expert)), "the leased bytes"
        slots.backend.commit_slot(slots.store, staging).wait()
        assert not slots.wrong(0, ExpertKey(6, expert)), "the slot committed first"
        assert not slots.wrong(1, ExpertKey(7, expert)), "the slot whose staging was leased meanwhile"
