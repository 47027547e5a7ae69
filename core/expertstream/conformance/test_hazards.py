"""Kernels that read while commits run see the old expert or the new one, as was ordered, and never a mixture."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from threading import Event, Thread

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from expertstream import ExpertKey, SlotLayout
from expertstream.conformance.experts import LARGE, SMALL
from expertstream.conformance.plugin import LaunchRead, OpenSlots
from expertstream.conformance.slots_under_test import SlotsUnderTest

BOTH_SIZES = pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])


@pytest.mark.hook("launch_read", "commit_slot")
def test_a_launched_read_returns_the_bytes_of_its_slot(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    slots = open_slots(SMALL, 3)
    for slot in range(3):
        slots.load(slot, ExpertKey(1, slot))
    for stream in streams:
        reads = [launch_read(slots.store, slot, stream, 1) for slot in range(3)]
        assert [slots.wrong_bytes(read(), ExpertKey(1, slot)) for slot, read in enumerate(reads)] == [""] * 3


@pytest.mark.hook("commit_slot")
@BOTH_SIZES
def test_a_read_ordered_after_a_commit_sees_its_bytes(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int], layout: SlotLayout
) -> None:
    slots = open_slots(layout, 2)
    for expert in range(16):
        slot, stream, key = expert % 2, streams[expert % len(streams)], ExpertKey(2, expert)
        commit = slots.commit(slot, key)
        commit.order_before(stream)
        assert not slots.wrong_bytes(launch_read(slots.store, slot, stream, 0)(), key)


@pytest.mark.hook("commit_slot")
@BOTH_SIZES
def test_a_refill_waits_for_the_reader(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int], layout: SlotLayout
) -> None:
    slots = open_slots(layout, 2)
    slots.load(0, ExpertKey(3, 0))
    for expert in range(1, 4):
        old, new, stream = ExpertKey(3, expert - 1), ExpertKey(3, expert), streams[0]
        read = launch_read(slots.store, 0, stream, 30)
        slots.store.mark_read(0, stream)
        commit = slots.commit(0, new)
        assert not slots.wrong_bytes(read(), old)
        commit.wait()
        assert not slots.wrong(0, new)


@pytest.mark.hook("commit_slot")
def test_a_refill_waits_for_every_reader_of_one_stream(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    slots = open_slots(SMALL, 2)
    slots.load(0, ExpertKey(4, 0))
    reads = []
    for _ in range(3):
        reads.append(launch_read(slots.store, 0, streams[0], 15))
        slots.store.mark_read(0, streams[0])
    slots.load(0, ExpertKey(4, 1))
    assert [slots.wrong_bytes(read(), ExpertKey(4, 0)) for read in reads] == [""] * 3
    assert not slots.wrong(0, ExpertKey(4, 1))


@pytest.mark.hook("commit_slot")
def test_a_refill_waits_for_the_readers_of_every_stream(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    if len(streams) < 2:
        pytest.skip("the backend's additions name no second stream in a fixture `streams`")
    slots = open_slots(SMALL, 2)
    slots.load(0, ExpertKey(5, 0))
    for expert, (slow, quick) in enumerate([(streams[0], streams[1]), (streams[1], streams[0])], 1):
        slow_read = launch_read(slots.store, 0, slow, 60)
        slots.store.mark_read(0, slow)
        quick_read = launch_read(slots.store, 0, quick, 0)
        slots.store.mark_read(0, quick)
        slots.load(0, ExpertKey(5, expert))
        for read in (slow_read, quick_read):
            assert not slots.wrong_bytes(read(), ExpertKey(5, expert - 1))


@pytest.mark.hook("alloc_slot_store", "launch_read")
def test_close_waits_for_announced_reads(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    slots = open_slots(SMALL, 2)
    slots.load(1, ExpertKey(10, 1))
    read = launch_read(slots.store, 1, streams[0], 40)
    slots.store.mark_read(1, streams[0])
    slots.store.close()
    assert not slots.wrong_bytes(read(), ExpertKey(10, 1))


@pytest.mark.hook("commit_slot")
def test_neither_a_commit_nor_its_ordering_nor_a_mark_makes_the_host_wait(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    def early_enough() -> bool:
        slots = open_slots(SMALL, 2)
        slots.load(0, ExpertKey(7, 0))
        ended = _busy(slots, launch_read, streams[0])
        slots.store.mark_read(0, streams[0])
        if ended.is_set():
            return False
        staging = slots.store.stage(0)
        if ended.is_set():  # staging is the slot itself, and was rightly not lent before
            return slots.backend.host_memory_is_device_addressable()
        slots.backend.commit_slot(slots.store, staging).order_before(streams[-1])
        return not ended.is_set()

    assert _once_in(5, early_enough), (
        "commit_slot, order_before or mark_read returned only after the reads before it had ended"
    )


@settings(max_examples=3, phases=[Phase.generate], deadline=None, database=None, print_blob=True)
@given(seed=st.integers(0, 2**32))
def _race(slots: SlotsUnderTest, launch_read: LaunchRead, streams: Sequence[int], seed: int) -> None:
    order = random.Random(seed)
    slot_count = slots.store.slot_count
    held = {slot: ExpertKey(8, slot) for slot in range(slot_count)}
    for slot, key in held.items():
        slots.load(slot, key)
    reads: list[tuple[Callable[[], bytes], ExpertKey]] = []
    for expert in range(60):
        slot, stream = order.randrange(slot_count), order.choice(streams)
        if order.random() < 0.5:
            reads.append((launch_read(slots.store, slot, stream, order.choice([0, 0, 3])), held[slot]))
            slots.store.mark_read(slot, stream)
            continue
        held[slot] = ExpertKey(9, expert)
        commit = slots.commit(slot, held[slot])
        for reader in streams:
            commit.order_before(reader)
        if order.random() < 0.3:
            commit.wait()
    assert [slots.wrong_bytes(read(), key) for read, key in reads] == [""] * len(reads)


@pytest.mark.hook("commit_slot", "launch_read")
def test_reads_racing_commits_see_whole_experts_in_order(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    _race(open_slots(SMALL, 4), launch_read, streams)


def _busy(slots: SlotsUnderTest, launch_read: LaunchRead, stream: int) -> Event:
    """Two reads of slot 0 under way, one after the other: set once the first has ended, long before the second."""
    first, second = (launch_read(slots.store, 0, stream, 80) for _ in range(2))
    first_ended = Event()

    def wait() -> None:
        first()
        first_ended.set()
        second()

    Thread(target=wait, daemon=True).start()
    return first_ended


def _once_in(times: int, attempt: Callable[[], bool]) -> bool:
    """A busy machine may be late now and then, so what must come first need not in every attempt."""
    return any(attempt() for _ in range(times))
