"""A store ends once and for all: commits first, then its threads and its memory."""

from __future__ import annotations

import gc
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from expertstream import Backend, ExpertKey, StoreClosed
from expertstream.conformance.experts import LARGE, SMALL
from expertstream.conformance.plugin import OpenSlots
from expertstream.conformance.slots_under_test import SlotsUnderTest

THREADS_END_S = 5.0
LARGE_SLOTS = 6
PROCESS_PAGES = Path("/proc/self/statm")
"""Where the system has it, its second number is how many pages of this process lie in memory: proc(5)."""


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
    slots = open_slots(LARGE, LARGE_SLOTS)
    commits = [slots.commit(slot, ExpertKey(4, slot)) for slot in range(LARGE_SLOTS)]
    slots.store.close()
    assert [commit.done() for commit in commits] == [True] * LARGE_SLOTS


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
    _use_and_close(open_slots, streams)  # what a device starts once for the process is not the store's
    before = set(threading.enumerate())
    for _ in range(3):
        _use_and_close(open_slots, streams)
    until = time.monotonic() + THREADS_END_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < until:
        for thread in left:
            thread.join(THREADS_END_S / 10)
    assert not left, "threads are left of stores that are closed"


@pytest.mark.hook("alloc_slot_store")
def test_close_gives_the_memory_back(backend: Backend, open_slots: OpenSlots, streams: Sequence[int]) -> None:
    measures = _memory_measures(backend)
    if not measures:
        pytest.skip(f"the system does not tell a process's memory, nor backend {backend.name!r} the device's")
    store_bytes = LARGE_SLOTS * LARGE.slot_bytes
    for _ in range(2):  # what is allocated once for the process is not the store's
        _use_and_close(open_slots, streams)
    before = [measure() for measure in measures]
    for _ in range(8):
        _use_and_close(open_slots, streams)
    gc.collect()
    grown = [measure() - start for measure, start in zip(measures, before, strict=True)]
    assert max(grown) < 4 * store_bytes, f"8 stores of {store_bytes} bytes were closed, and {grown} bytes are not back"


def _use_and_close(open_slots: OpenSlots, streams: Sequence[int]) -> None:
    slots: SlotsUnderTest = open_slots(LARGE, LARGE_SLOTS)
    for slot in range(LARGE_SLOTS):
        slots.commit(slot, ExpertKey(6, slot)).order_before(streams[0])
        slots.store.mark_read(slot, streams[0])
    slots.store.close()


def _memory_measures(backend: Backend) -> list[Callable[[], int]]:
    """What tells how many bytes are in use: by this process and, where the device has memory of its own, there."""
    measures: list[Callable[[], int]] = []
    if PROCESS_PAGES.exists():
        measures.append(lambda: int(PROCESS_PAGES.read_text().split()[1]) * mmap.PAGESIZE)
    if not backend.host_memory_is_device_addressable() and backend.describe_device().free_bytes is not None:
        measures.append(lambda: -(backend.describe_device().free_bytes or 0))
    return measures
