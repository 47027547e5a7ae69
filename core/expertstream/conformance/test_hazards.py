"""Kernels that read while commits run see the old expert or the new one, as was ordered, and never a mixture."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest

from expertstream import ExpertKey, SlotLayout
from expertstream.conformance.experts import LARGE, SMALL
from expertstream.conformance.plugin import LaunchRead, OpenSlots

BOTH_SIZES = pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
READ_MS = 100


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


@pytest.mark.hook("launch_read")
def test_a_launched_read_sees_what_is_there_when_its_time_is_over(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    slots = open_slots(SMALL, 2)
    slots.load(0, ExpertKey(11, 0))
    for expert in range(1, 6):
        launched = time.monotonic()
        read = launch_read(slots.store, 0, streams[0], READ_MS)
        slots.load(0, ExpertKey(11, expert))  # it was not announced, so nothing keeps new bytes out
        is_early = time.monotonic() - launched < READ_MS / 2000
        found = read()
        if is_early:
            assert not slots.wrong_bytes(found, ExpertKey(11, expert))
            return
    pytest.skip(f"no refill landed while a read of {READ_MS} ms was under way, so when it reads cannot be told")


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
        assert not slots.wrong_bytes(read(), old), "what the reader saw"
        commit.wait()
        assert not slots.wrong(0, new), "what is there after the refill"


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


@pytest.mark.hook("alloc_slot_store", "commit_slot")
def test_stores_keep_their_readers_apart(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    first, second = open_slots(SMALL, 2), open_slots(SMALL, 2)
    first.load(0, ExpertKey(12, 0))
    second.load(0, ExpertKey(13, 0))
    for expert in range(1, 4):
        read = launch_read(first.store, 0, streams[0], 60)
        first.store.mark_read(0, streams[0])
        quick_read = launch_read(second.store, 0, streams[-1], 0)  # of the other store's slot of the same number
        second.store.mark_read(0, streams[-1])
        commits = [second.commit(0, ExpertKey(13, expert)), first.commit(0, ExpertKey(12, expert))]
        assert not first.wrong_bytes(read(), ExpertKey(12, expert - 1)), "what the reader saw"
        assert not second.wrong_bytes(quick_read(), ExpertKey(13, expert - 1)), "what the other store's reader saw"
        for commit in commits:
            commit.wait()
        assert not first.wrong(0, ExpertKey(12, expert)), "what is there after the refill"
        assert not second.wrong(0, ExpertKey(13, expert)), "what is there after the other store's refill"


@pytest.mark.hook("commit_slot")
def test_refills_behind_a_reader_land_in_the_order_of_their_commits(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    slots = open_slots(SMALL, 2)
    slots.load(0, ExpertKey(14, 0))
    for old in (0, 5, 10):
        read = launch_read(slots.store, 0, streams[0], 30)
        slots.store.mark_read(0, streams[0])
        commits = [slots.commit(0, ExpertKey(14, old + refill)) for refill in range(1, 6)]
        assert not slots.wrong_bytes(read(), ExpertKey(14, old)), "what the reader saw"
        for commit in commits:
            commit.wait()
        assert not slots.wrong(0, ExpertKey(14, old + 5)), "what is there after the last refill"


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


@pytest.mark.hook("commit_slot", "launch_read")
def test_reads_racing_commits_see_whole_experts_in_order(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int], random_seed: int
) -> None:
    order = random.Random(random_seed)
    slots = open_slots(SMALL, 4)
    held = {slot: ExpertKey(8, slot) for slot in range(4)}
    for slot, key in held.items():
        slots.load(slot, key)
    reads: list[tuple[Callable[[], bytes], ExpertKey]] = []
    for expert in range(180):
        slot, stream = order.randrange(4), order.choice(streams)
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
