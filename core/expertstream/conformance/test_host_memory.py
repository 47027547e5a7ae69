"""What a store and its host slots take is measured, refused in words where it cannot be had, and given back."""

from __future__ import annotations

import gc
import re
import threading
from itertools import pairwise

import pytest

from expertstream import Backend, DeviceOutOfMemory, ExpertKey, StoreClosed
from expertstream.conformance.experts import LARGE, SMALL
from expertstream.conformance.holdings import growth, memory_in_use, memory_taken
from expertstream.conformance.plugin import OpenSlots, OpenTier, StarveStaging
from expertstream.conformance.slots_under_test import SlotsUnderTest

IMPOSSIBLE = (1 << 50) // SMALL.slot_bytes
ENOUGH = 4
TOO_MANY = 2 * ENOUGH
HOST_SLOTS = 6


@pytest.mark.hook("measure_store")
@pytest.mark.parametrize("slot_count", [1, 5])
def test_a_store_measures_what_its_slots_take(backend: Backend, open_slots: OpenSlots, slot_count: int) -> None:
    slots = open_slots(LARGE, slot_count)
    needed_bytes = slot_count * LARGE.slot_bytes
    before = backend.measure_store(slots.store)
    slots.load(0, ExpertKey(1, 0))
    assert needed_bytes <= before.slot_bytes <= 2 * needed_bytes
    assert backend.measure_store(slots.store) == before, "measured again after the store was used"


@pytest.mark.hook("budget_for_expert_size", "measure_store")
@pytest.mark.parametrize("slot_count", [1, 5])
def test_a_new_store_pins_no_more_than_its_budget_says(
    backend: Backend, open_slots: OpenSlots, slot_count: int
) -> None:
    staging_bytes = backend.budget_for_expert_size(LARGE.slot_bytes, 0, slot_count).staging_bytes
    memory = backend.measure_store(open_slots(LARGE, slot_count).store)
    slots_in_host_bytes = memory.slot_bytes if backend.host_memory_is_device_addressable() else 0
    assert memory.pinned_bytes <= slots_in_host_bytes + staging_bytes


@pytest.mark.hook("measure_store", "alloc_host_slots")
def test_a_store_measures_what_its_host_slots_take(
    backend: Backend, open_slots: OpenSlots, open_tier: OpenTier
) -> None:
    measured = [backend.measure_store(open_slots(LARGE, 2).store)]
    tier = open_tier(LARGE, 2, 3)
    measured.append(backend.measure_store(tier.slots.store))
    tier.slots.host_slots(5)
    measured.append(backend.measure_store(tier.slots.store))
    assert len({memory.slot_bytes for memory in measured}) == 1, "host slots are not slots"
    for (before, after), host_slot_count in zip(pairwise(measured), (3, 5), strict=True):
        needed_bytes = host_slot_count * LARGE.slot_bytes
        assert needed_bytes <= after.pinned_bytes - before.pinned_bytes <= 2 * needed_bytes


@pytest.mark.hook("alloc_host_slots")
def test_host_slots_that_cannot_be_had_are_refused(open_tier: OpenTier) -> None:
    refusal = _refusal(open_tier(SMALL, 2, 1).slots, IMPOSSIBLE)
    numbers = re.findall(r"\d+", re.sub(r"(?<=\d)[,_](?=\d)", "", refusal))
    assert any(int(number) >= IMPOSSIBLE * SMALL.slot_bytes for number in numbers), (
        f"the message lacks the bytes asked for: {refusal}"
    )


@pytest.mark.hook("alloc_host_slots", "measure_store")
def test_a_store_goes_on_after_host_slots_were_refused(backend: Backend, open_tier: OpenTier) -> None:
    tier = open_tier(SMALL, 3, 2)
    slots = tier.slots
    tier.commit(1, 0, ExpertKey(2, 1)).wait()
    measured, threads = backend.measure_store(slots.store), set(threading.enumerate())
    for _ in range(3):
        _refusal(slots, IMPOSSIBLE)
    gc.collect()
    assert backend.measure_store(slots.store) == measured, "measured after refusals"
    assert set(threading.enumerate()) <= threads, "threads are left of host slots that were refused"
    assert not slots.wrong(0, ExpertKey(2, 1)), "what is in a slot"
    assert not tier.wrong(1, 1, ExpertKey(2, 1)), "what is in a host slot"
    slots.load(2, ExpertKey(2, 2))
    assert not slots.wrong(2, ExpertKey(2, 2)), "what comes into a slot"


@pytest.mark.hook("alloc_host_slots")
def test_half_of_the_host_slots_are_had_where_all_of_them_cannot_be(
    open_slots: OpenSlots, open_tier: OpenTier, starve_staging: StarveStaging
) -> None:
    starve_staging(SMALL, ENOUGH)
    slots = open_slots(SMALL, 2)
    for _ in range(3):
        _refusal(slots, TOO_MANY)
        tier = slots.host_slots(ENOUGH)
        for host_slot in range(ENOUGH):
            tier.commit(host_slot, 0, ExpertKey(3, host_slot)).wait()
        assert [tier.wrong(number, 1, ExpertKey(3, number)) for number in range(ENOUGH)] == [""] * ENOUGH


@pytest.mark.hook("alloc_host_slots")
def test_refused_host_slots_leave_nothing_behind(
    backend: Backend, open_slots: OpenSlots, open_tier: OpenTier, starve_staging: StarveStaging
) -> None:
    memories = memory_taken(backend)
    if not memories:
        pytest.skip(f"the system does not tell a process's memory, nor backend {backend.name!r} the device's")
    starve_staging(LARGE, ENOUGH)
    slots = open_slots(LARGE, 2)
    asked_bytes = TOO_MANY * LARGE.slot_bytes
    assert not growth(
        memories,
        f"host slots of {asked_bytes} bytes were refused",
        lambda: _refusal(slots, TOO_MANY),
        times=16,
        allowed_bytes=4 * asked_bytes,
    )


@pytest.mark.hook("alloc_host_slots")
@pytest.mark.parametrize("use", ["stage", "restage", "keep"])
def test_host_slots_of_a_closed_store_lend_and_take_nothing(open_tier: OpenTier, use: str) -> None:
    tier = open_tier(SMALL, 2, 2)
    tier.commit(1, 1, ExpertKey(4, 1)).wait()
    tier.slots.store.close()
    for _ in range(3):
        with pytest.raises(StoreClosed):
            tier.use(use, 1, 1)


@pytest.mark.hook("alloc_host_slots")
def test_close_gives_the_memory_of_host_slots_back(backend: Backend, open_tier: OpenTier) -> None:
    memories = memory_in_use(backend)
    if not memories:
        pytest.skip(f"the system does not tell a process's memory, nor backend {backend.name!r} the device's")
    left = []  # a closed store and its host slots are not gone as long as somebody has them

    def use_and_close() -> None:
        tier = open_tier(LARGE, 2, HOST_SLOTS)
        for host_slot in range(HOST_SLOTS):
            tier.commit(host_slot, host_slot % 2, ExpertKey(5, host_slot))
        tier.slots.store.close()
        left.append(tier)

    tier_bytes = HOST_SLOTS * LARGE.slot_bytes
    assert not growth(
        memories,
        f"a store with host slots of {tier_bytes} bytes was opened, used and closed",
        use_and_close,
        times=16,
        allowed_bytes=2 * tier_bytes,  # less than a host slot each time
    )


def _refusal(slots: SlotsUnderTest, host_slot_count: int) -> str:
    """What the backend says to host slots that it cannot make."""
    with pytest.raises(DeviceOutOfMemory) as refusal:
        slots.host_slots(host_slot_count)
    return str(refusal.value)
