"""A store ends once and for all: commits and copies first, then its threads, its descriptors and its memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

import pytest

from expertstream import Backend, ExpertKey, SlotLayout, StoreClosed
from expertstream.conformance.experts import LARGE, SMALL
from expertstream.conformance.holdings import growth, memory_in_use, open_descriptors
from expertstream.conformance.plugin import OpenSlots, OpenTier
from expertstream.conformance.slots_under_test import HostSlotsUnderTest

THREADS_END_S = 5.0
SLOT_COUNT = 6
HOST_SLOTS = 4
COPIES_BACK = 32
ATTEMPTS = 3


@pytest.mark.hook("alloc_slot_store")
def test_closing_twice_does_nothing(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 2)
    slots.load(0, ExpertKey(1, 0))
    for _ in range(3):
        slots.store.close()


@pytest.mark.hook("alloc_slot_store")
def test_an_unused_store_closes(open_slots: OpenSlots) -> None:
    open_slots(SMALL, 2).store.close()


@pytest.mark.hook("alloc_slot_store")
def test_a_closed_store_lends_nothing(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 2)
    slots.load(1, ExpertKey(2, 1))
    slots.store.close()
    for _ in range(8):  # more often than there are staging buffers
        with pytest.raises(StoreClosed):
            slots.store.stage(1)


@pytest.mark.hook("alloc_slot_store")
@pytest.mark.parametrize("use", ["device_view", "read_back"])
def test_a_closed_store_shows_nothing(open_slots: OpenSlots, use: str) -> None:
    slots = open_slots(SMALL, 2)
    slots.load(1, ExpertKey(3, 1))
    slots.store.close()
    with pytest.raises(StoreClosed):
        getattr(slots.store, use)(1)


@pytest.mark.hook("alloc_slot_store", "commit_slot")
def test_close_waits_for_commits_under_way(open_slots: OpenSlots) -> None:
    slots = open_slots(LARGE, SLOT_COUNT)
    commits = [slots.commit(slot, ExpertKey(4, slot)) for slot in range(SLOT_COUNT)]
    slots.store.close()
    assert [commit.done() for commit in commits] == [True] * SLOT_COUNT


@pytest.mark.hook("alloc_slot_store", "alloc_host_slots")
def test_close_waits_for_copies_into_host_slots(open_tier: OpenTier) -> None:
    # Once the memory is gone, nothing but the time that closing took tells whether they had ended.
    def seconds_of_copies_until(end: Callable[[HostSlotsUnderTest], None]) -> float:
        tier = open_tier(LARGE, 1, HOST_SLOTS)
        tier.slots.load(0, ExpertKey(7, 0))
        began = time.monotonic()
        for copy in range(COPIES_BACK):
            tier.host_slots.keep(0, copy % HOST_SLOTS)
        end(tier)
        ended = time.monotonic()
        tier.slots.store.close()
        return ended - began

    def last_is_over(tier: HostSlotsUnderTest) -> None:
        tier.slots.store.discard(tier.host_slots.stage((COPIES_BACK - 1) % HOST_SLOTS, 0))

    copied, closed = [], []
    for _ in range(ATTEMPTS):
        copied.append(seconds_of_copies_until(last_is_over))
        closed.append(seconds_of_copies_until(lambda tier: tier.slots.store.close()))
    assert median(closed) >= median(copied) / 2, (
        f"{COPIES_BACK} copies into host slots were over {median(copied):.4f} s after the first one was started, and"
        f" closing the store instead was over after {median(closed):.4f} s"
    )


@pytest.mark.hook("commit_slot")
def test_a_commit_outlives_the_refill_of_its_slot(open_slots: OpenSlots) -> None:
    slots = open_slots(SMALL, 1)
    commits = []
    for expert in range(5):
        commits.append(slots.commit(0, ExpertKey(5, expert)))
        commits[-1].wait()
    assert [commit.done() for commit in commits] == [True] * 5


@pytest.mark.hook("alloc_slot_store")
def test_close_ends_the_stores_threads(open_slots: OpenSlots, streams: Sequence[int]) -> None:
    _use_and_close(open_slots, LARGE, streams)  # what a device starts once for the process is not the store's
    before = set(threading.enumerate())
    for _ in range(3):
        _use_and_close(open_slots, LARGE, streams)
    until = time.monotonic() + THREADS_END_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < until:
        for thread in left:
            thread.join(THREADS_END_S / 10)
    assert not left, "threads are left of stores that are closed"


@pytest.mark.hook("alloc_slot_store")
def test_close_gives_descriptors_back(open_slots: OpenSlots, streams: Sequence[int]) -> None:
    if open_descriptors() is None:
        pytest.skip("the system does not tell which descriptors a process has open")
    times, allowed = 16, 8
    for _ in range(2):  # what is opened once for the process is not the store's
        _use_and_close(open_slots, SMALL, streams)
    gc.collect()
    before = open_descriptors() or 0
    for _ in range(times):
        _use_and_close(open_slots, SMALL, streams)
    gc.collect()
    after = open_descriptors() or 0
    assert after - before <= allowed, (
        f"{times} times a store was opened, used and closed: this process had {before} descriptors open before and"
        f" {after} after; up to {allowed} more are allowed"
    )


@pytest.mark.hook("alloc_slot_store")
def test_close_gives_the_memory_back(backend: Backend, open_slots: OpenSlots, streams: Sequence[int]) -> None:
    memories = memory_in_use(backend)
    if not memories:
        pytest.skip(f"the system does not tell a process's memory, nor backend {backend.name!r} the device's")
    store_bytes = SLOT_COUNT * LARGE.slot_bytes
    assert not growth(
        memories,
        f"a store of {store_bytes} bytes was opened, used and closed",
        lambda: _use_and_close(open_slots, LARGE, streams),
        times=16,
        allowed_bytes=2 * store_bytes,  # less than a staging buffer each time
    )


def _use_and_close(open_slots: OpenSlots, layout: SlotLayout, streams: Sequence[int]) -> None:
    slots = open_slots(layout, SLOT_COUNT)
    for slot in range(SLOT_COUNT):
        slots.commit(slot, ExpertKey(6, slot)).order_before(streams[0])
        slots.store.mark_read(slot, streams[0])
    slots.store.close()
