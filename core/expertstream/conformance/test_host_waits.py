"""What must not make the host wait returns while a read that it could have waited for is still under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from expertstream import Backend, ExpertKey
from expertstream.conformance.experts import SMALL
from expertstream.conformance.plugin import LaunchRead, OpenSlots
from expertstream.conformance.slots_under_test import SlotsUnderTest

READ_MS = 100
ATTEMPTS = 5
"""A busy machine may be late now and then; a call that waits is late each time."""

Call = Callable[[], object]


@pytest.mark.hook("launch_read")
def test_a_launch_does_not_wait_for_its_read(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    def launch(slots: SlotsUnderTest) -> Call:
        return lambda: launch_read(slots.store, 0, streams[0], READ_MS)

    assert not _lateness("launch_read", open_slots, launch)


@pytest.mark.hook("alloc_slot_store")
def test_a_mark_does_not_wait_for_the_reads_that_it_announces(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    def mark(slots: SlotsUnderTest) -> Call:
        launch_read(slots.store, 0, streams[0], READ_MS)
        return lambda: slots.store.mark_read(0, streams[0])

    assert not _lateness("mark_read", open_slots, mark)


@pytest.mark.hook("commit_slot")
def test_a_commit_does_not_wait_for_announced_reads(
    backend: Backend, open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    _need_staging_beside_slots(backend)

    def commit(slots: SlotsUnderTest) -> Call:
        launch_read(slots.store, 0, streams[0], READ_MS)
        slots.store.mark_read(0, streams[0])
        staging = slots.store.stage(0)
        return lambda: slots.backend.commit_slot(slots.store, staging)

    assert not _lateness("commit_slot", open_slots, commit)


@pytest.mark.hook("commit_slot")
def test_ordering_a_stream_after_a_commit_does_not_wait_for_its_copy(
    backend: Backend, open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    _need_staging_beside_slots(backend)

    def order(slots: SlotsUnderTest) -> Call:
        launch_read(slots.store, 0, streams[0], READ_MS)
        slots.store.mark_read(0, streams[0])
        commit = slots.commit(0, ExpertKey(1, 1))
        return lambda: commit.order_before(streams[-1])

    assert not _lateness("order_before", open_slots, order)


@pytest.mark.hook("commit_slot")
def test_asking_whether_a_commit_is_done_does_not_wait_for_its_copy(
    backend: Backend, open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    _need_staging_beside_slots(backend)

    def ask(slots: SlotsUnderTest) -> Call:
        launch_read(slots.store, 0, streams[0], READ_MS)
        slots.store.mark_read(0, streams[0])
        return slots.commit(0, ExpertKey(1, 1)).done

    assert not _lateness("done", open_slots, ask)


@pytest.mark.hook("alloc_host_slots")
@pytest.mark.usefixtures("open_tier")  # skips where there is no host tier
@pytest.mark.parametrize("behind", ["a reader of the slot", "other copies", "the copy out of its host slot"])
def test_keep_does_not_wait(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int], behind: str
) -> None:
    def keep(slots: SlotsUnderTest) -> Call:
        slots.load(1, ExpertKey(2, 1))
        tier = slots.host_slots(1)
        launch_read(slots.store, 0, streams[0], READ_MS)
        slots.store.mark_read(0, streams[0])
        if behind == "a reader of the slot":
            return lambda: tier.host_slots.keep(0, 0)
        if behind == "other copies":
            slots.commit(0, ExpertKey(1, 1))
        else:
            tier.commit(0, 0, ExpertKey(1, 1))
        return lambda: tier.host_slots.keep(1, 0)

    assert not _lateness("keep", open_slots, keep)


@pytest.mark.hook("alloc_host_slots", "commit_slot")
@pytest.mark.usefixtures("open_tier")  # skips where there is no host tier
@pytest.mark.parametrize("call", ["restage", "commit_slot"])
@pytest.mark.parametrize("behind", ["keep", "commit_slot", "keep behind commit_slot"])
def test_nothing_waits_for_the_bytes_of_a_host_slot_on_their_way(
    open_slots: OpenSlots, launch_read: LaunchRead, streams: Sequence[int], behind: str, call: str
) -> None:
    def restage(slots: SlotsUnderTest) -> Call:
        slots.load(1, ExpertKey(2, 1))
        tier = slots.host_slots(1)
        launch_read(slots.store, 0, streams[0], READ_MS)
        slots.store.mark_read(0, streams[0])
        if behind == "keep":  # which need not wait for this copy, but does where all copies are made in turn
            slots.commit(0, ExpertKey(1, 1))
        else:  # a copy out of the host slot itself, which waits for the reader
            tier.commit(0, 0, ExpertKey(1, 1))
        if behind != "commit_slot":
            tier.host_slots.keep(1, 0)
        if call == "restage":
            return lambda: tier.host_slots.restage(0, 1)
        staging = tier.host_slots.restage(0, 1)
        return lambda: slots.backend.commit_slot(slots.store, staging)

    assert not _lateness(call, open_slots, restage)


def _lateness(name: str, open_slots: OpenSlots, prepare: Callable[[SlotsUnderTest], Call]) -> str:
    """How late the call returns that `prepare` makes; empty if a read launched meanwhile is surely under way then."""
    attempts = []
    for _ in range(ATTEMPTS):
        slots = open_slots(SMALL, 2)
        slots.load(0, ExpertKey(1, 0))
        began = time.monotonic()
        call = prepare(slots)
        called = time.monotonic()
        call()
        returned = time.monotonic()
        if returned - began < READ_MS / 2000:
            return ""
        attempts.append(f"{1000 * (called - began):.0f} to {1000 * (returned - began):.0f} ms")
    return (
        f"a read of slot 0 takes {READ_MS} ms, and {name} returned no sooner than half of that: it took"
        f" {', '.join(attempts)} from when the read was launched, in {ATTEMPTS} attempts"
    )


def _need_staging_beside_slots(backend: Backend) -> None:
    if backend.host_memory_is_device_addressable():
        pytest.skip(f"backend {backend.name!r}: staging is the slot itself, so nothing is left to wait for at a commit")
