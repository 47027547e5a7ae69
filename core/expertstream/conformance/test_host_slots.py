"""Host slots are lent as staging is, and keep what was committed from them or copied into them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from threading import Barrier, Thread

import numpy as np
import pytest

from expertstream import Commit, CommitFailed, ExpertKey, SlotLayout, Staging
from expertstream.conformance.experts import LARGE, SMALL, layout_of_pages
from expertstream.conformance.fillers import FILLERS
from expertstream.conformance.plugin import BreakNextCommit, LaunchRead, OpenTier
from expertstream.conformance.slots_under_test import HostSlotsUnderTest

BOTH_SIZES = pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
COPIES_BEFORE = 8
"""So many copies of slots of several MiB are not over before the next call, however fast the device."""
READ_MS = 30
MORE_THAN_ANY_BUFFERS = 400
LEASING_S = 0.2
"""Leasing takes no such time, so what goes on for longer is waiting for a buffer."""


@pytest.mark.hook("alloc_host_slots")
@BOTH_SIZES
def test_host_slots_are_as_many_as_asked_for(open_tier: OpenTier, layout: SlotLayout) -> None:
    tier = open_tier(layout, 2, 1)
    assert tier.host_slots.slot_count == 1
    assert tier.slots.host_slots(5).host_slots.slot_count == 5, "the second piece"


@pytest.mark.hook("alloc_host_slots")
@BOTH_SIZES
def test_a_host_slot_is_writable_bytes_for_the_whole_slot_asked_for(open_tier: OpenTier, layout: SlotLayout) -> None:
    tier = open_tier(layout, 3, 4)
    for host_slot, slot in ((3, 2), (0, 0), (1, 1), (2, 0)):
        staging = tier.host_slots.stage(host_slot, slot)
        assert staging.slot == slot
        assert (staging.view.ndim, staging.view.itemsize) == (1, 1), "not single bytes"
        assert len(staging.view) == layout.slot_bytes
        assert not staging.view.readonly
        tier.slots.store.discard(staging)


@pytest.mark.hook("alloc_host_slots")
@pytest.mark.parametrize("alignment", [4096, 16384])
def test_host_slots_are_aligned(open_tier: OpenTier, alignment: int) -> None:
    tier = open_tier(layout_of_pages(3, 2, alignment=alignment), 2, 5)
    for piece in (tier, tier.slots.host_slots(3)):
        for host_slot in range(piece.host_slots.slot_count):
            staging = piece.host_slots.stage(host_slot, 0)
            assert _span(staging)[0] % alignment == 0
            tier.slots.store.discard(staging)


@pytest.mark.hook("alloc_host_slots")
@BOTH_SIZES
def test_host_slots_overlap_with_nothing_else_that_is_lent(open_tier: OpenTier, layout: SlotLayout) -> None:
    tier = open_tier(layout, 2, 3)
    store = tier.slots.store
    pieces = [tier, tier.slots.host_slots(1), tier.slots.host_slots(4)]
    leased = [piece.host_slots.stage(number, 0) for piece in pieces for number in range(piece.host_slots.slot_count)]
    of_store = set()
    for _ in range(MORE_THAN_ANY_BUFFERS):
        staging = store.stage(1)
        of_store.add(_span(staging))
        store.discard(staging)
    spans = sorted([*of_store, *map(_span, leased)])
    for (_, end), (begin, _) in pairwise(spans):
        assert end <= begin, f"a lease begins {end - begin} bytes before another one ends"
    for staging in leased:
        store.discard(staging)


@pytest.mark.hook("alloc_host_slots")
def test_a_host_slot_is_lent_again_and_again(open_tier: OpenTier) -> None:
    tier = open_tier(SMALL, 2, 2)
    for count in range(MORE_THAN_ANY_BUFFERS):
        tier.slots.store.discard(tier.host_slots.stage(0, count % 2))
    for expert in range(MORE_THAN_ANY_BUFFERS // 16):
        tier.commit(1, expert % 2, ExpertKey(1, expert % 5)).wait()
        tier.recommit(1, expert % 2).wait()
        tier.slots.store.discard(tier.host_slots.restage(1, expert % 2))


@pytest.mark.hook("alloc_host_slots", "commit_slot")
@pytest.mark.parametrize("end", ["discard", "commit"])
def test_a_host_slot_is_lent_to_nobody_else_when_its_lease_has_ended(open_tier: OpenTier, end: str) -> None:
    tier = open_tier(SMALL, 3, 1)
    store = tier.slots.store
    of_tier = set()
    for piece in (tier, tier.slots.host_slots(1)) * 2:
        staging = piece.host_slots.stage(0, 1)
        of_tier.add(_span(staging))
        if end == "discard":
            store.discard(staging)
        else:
            tier.slots.backend.commit_slot(store, staging).wait()
    for _ in range(MORE_THAN_ANY_BUFFERS):
        staging = store.stage(2)
        assert _span(staging) not in of_tier, "the store has lent a host slot as staging for whoever comes"
        store.discard(staging)


@pytest.mark.hook("alloc_host_slots", "commit_slot")
def test_host_slots_need_none_of_the_stores_staging(open_tier: OpenTier) -> None:
    leases: SimpleQueue[Staging] = SimpleQueue()
    tier = open_tier(SMALL, 64, 2)
    slots = tier.slots
    slots_to_lease = range(2, slots.store.slot_count)

    def lease_until_none_is_free() -> None:
        for slot in slots_to_lease:
            leases.put(slots.store.stage(slot))

    leasing = Thread(target=lease_until_none_is_free, daemon=True)  # where it waits for ever, the test has failed
    leasing.start()
    leasing.join(LEASING_S)
    if not leasing.is_alive():
        pytest.skip(f"backend {slots.backend.name!r} stages {len(slots_to_lease)} slots at once, so none has to wait")
    key = ExpertKey(20, 0)
    tier.commit(0, 0, key).wait()
    assert not slots.wrong(0, key), "what was committed from a host slot"
    tier.host_slots.keep(0, 1)
    assert not tier.wrong(1, 1, key), "what was kept"
    for _ in slots_to_lease:
        slots.store.discard(leases.get())
    leasing.join()


@pytest.mark.hook("alloc_host_slots")
@pytest.mark.parametrize("use", ["stage", "restage", "keep"])
@pytest.mark.parametrize(("host_slot", "slot"), [(-1, 0), (3, 0), (1 << 40, 0), (0, -1), (0, 2), (0, 1 << 40)])
def test_a_host_slot_or_slot_that_does_not_exist_is_refused(
    open_tier: OpenTier, use: str, host_slot: int, slot: int
) -> None:
    tier = open_tier(SMALL, 2, 3)
    tier.commit(2, 1, ExpertKey(3, 1)).wait()
    for _ in range(8):
        with pytest.raises(IndexError):
            tier.use(use, host_slot, slot)
    assert not tier.wrong(2, 0, ExpertKey(3, 1))


@pytest.mark.hook("alloc_host_slots", "commit_slot")
@BOTH_SIZES
def test_what_was_committed_from_a_host_slot_is_committed_again(open_tier: OpenTier, layout: SlotLayout) -> None:
    tier = open_tier(layout, 3, 2)
    for expert in range(4):
        key = ExpertKey(4, expert)
        commits = [tier.commit(expert % 2, 0, key), tier.recommit(expert % 2, 1)]
        for commit in commits:
            commit.wait()
        assert not tier.slots.wrong(0, key), "the slot that it was filled for"
        assert not tier.slots.wrong(1, key), "another slot"
        for refill in range(3):
            tier.slots.load(0, ExpertKey(5, refill))
        assert not tier.wrong(expert % 2, 0, key), "the first slot, after it was refilled"


@pytest.mark.hook("alloc_host_slots")
@BOTH_SIZES
def test_each_host_slot_of_each_piece_keeps_its_own_expert(open_tier: OpenTier, layout: SlotLayout) -> None:
    tier = open_tier(layout, 3, 3)
    pieces = [tier, tier.slots.host_slots(1), tier.slots.host_slots(4)]
    places = [(piece, number) for piece in pieces for number in range(piece.host_slots.slot_count)]
    for expert, (piece, host_slot) in enumerate(places):
        piece.commit(host_slot, expert % 3, ExpertKey(18, expert))
    wrongs = [piece.wrong(host_slot, 0, ExpertKey(18, expert)) for expert, (piece, host_slot) in enumerate(places)]
    assert wrongs == [""] * len(places), "what was committed from them"
    for expert, (piece, host_slot) in enumerate(places):
        tier.slots.load(1, ExpertKey(19, expert))
        piece.host_slots.keep(1, host_slot)
    wrongs = [piece.wrong(host_slot, 2, ExpertKey(19, expert)) for expert, (piece, host_slot) in enumerate(places)]
    assert wrongs == [""] * len(places), "what was kept in them"


@pytest.mark.hook("alloc_host_slots")
@BOTH_SIZES
def test_keep_takes_the_bytes_that_the_slot_has(open_tier: OpenTier, layout: SlotLayout) -> None:
    tier = open_tier(layout, 3, 6)
    tier.slots.load(0, ExpertKey(6, 0))
    tier.slots.load(2, ExpertKey(6, 99))
    for expert in range(5):
        _copy_meanwhile(tier, 2, 5)
        tier.host_slots.keep(0, expert)
        refill = tier.slots.commit(0, ExpertKey(6, expert + 1))  # at once
        assert not tier.wrong(expert, 1, ExpertKey(6, expert)), "what was kept"
        refill.wait()
        assert not tier.slots.wrong(0, ExpertKey(6, expert + 1)), "what is there after the refill"
    assert [tier.wrong(expert, 1, ExpertKey(6, expert)) for expert in range(5)] == [""] * 5, "what was kept, later"


@pytest.mark.hook("alloc_host_slots", "commit_slot")
@BOTH_SIZES
def test_two_experts_change_places_between_a_slot_and_a_host_slot(open_tier: OpenTier, layout: SlotLayout) -> None:
    tier = open_tier(layout, 3, 3)
    tier.slots.load(2, ExpertKey(7, 99))
    tier.commit(0, 1, ExpertKey(7, 0)).wait()
    tier.slots.load(0, ExpertKey(7, 1))
    for _ in range(3):
        for leaving, coming in ((1, 0), (0, 1)):  # each has a host slot of its own, to come from and to go to
            _copy_meanwhile(tier, 2, 2)
            tier.host_slots.keep(0, leaving)
            tier.recommit(coming, 0).wait()
            tier.scribble(coming, 1)
            assert not tier.slots.wrong(0, ExpertKey(7, coming)), "what came into the slot"
            assert not tier.wrong(leaving, 1, ExpertKey(7, leaving)), "what left the slot"


@pytest.mark.hook("alloc_host_slots")
@BOTH_SIZES
def test_what_keep_takes_is_committed_without_a_wait(open_tier: OpenTier, layout: SlotLayout) -> None:
    tier = open_tier(layout, 3, 2)
    tier.slots.load(2, ExpertKey(8, 99))
    for expert in range(5):
        tier.slots.load(0, ExpertKey(8, expert))
        _copy_meanwhile(tier, 2, 1)
        tier.host_slots.keep(0, 0)
        assert not tier.wrong(0, 1, ExpertKey(8, expert))


@pytest.mark.hook("alloc_host_slots", "launch_read")
@BOTH_SIZES
def test_keep_takes_the_bytes_of_a_slot_that_is_being_read(
    open_tier: OpenTier, launch_read: LaunchRead, streams: Sequence[int], layout: SlotLayout
) -> None:
    tier = open_tier(layout, 2, 2)
    slots = tier.slots
    slots.load(0, ExpertKey(9, 0))
    for expert in range(3):
        read = launch_read(slots.store, 0, streams[0], READ_MS)
        slots.store.mark_read(0, streams[0])
        tier.host_slots.keep(0, 0)
        refill = slots.commit(0, ExpertKey(9, expert + 1))
        assert not slots.wrong_bytes(read(), ExpertKey(9, expert)), "what the reader saw"
        assert not tier.wrong(0, 1, ExpertKey(9, expert)), "what was kept"
        refill.wait()
        assert not slots.wrong(0, ExpertKey(9, expert + 1)), "what is there after the refill"


@pytest.mark.hook("alloc_host_slots", "commit_slot")
@BOTH_SIZES
def test_a_host_slot_is_not_lent_before_the_copies_out_of_it_have_ended(
    open_tier: OpenTier, layout: SlotLayout
) -> None:
    tier = open_tier(layout, 3, 2)
    for expert in range(5):
        key = ExpertKey(10, expert)
        commits = [tier.commit(0, 0, key), *(tier.recommit(0, copy % 2) for copy in range(COPIES_BEFORE))]
        tier.scribble(0, 2)
        for commit in commits:
            commit.wait()
        assert [tier.slots.wrong(slot, key) for slot in range(2)] == [""] * 2


@pytest.mark.hook("alloc_host_slots", "commit_slot", "launch_read")
def test_a_host_slot_is_not_lent_while_the_copy_out_of_it_waits_for_a_reader(
    open_tier: OpenTier, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    tier = open_tier(SMALL, 2, 2)
    slots = tier.slots
    slots.load(0, ExpertKey(11, 0))
    for expert in range(1, 4):
        read = launch_read(slots.store, 0, streams[0], READ_MS)
        slots.store.mark_read(0, streams[0])
        refill = tier.commit(1, 0, ExpertKey(11, expert))
        tier.scribble(1, 1)
        refill.wait()
        assert not slots.wrong_bytes(read(), ExpertKey(11, expert - 1)), "what the reader saw"
        assert not slots.wrong(0, ExpertKey(11, expert)), "what is there after the refill"


@pytest.mark.hook("alloc_host_slots")
@BOTH_SIZES
def test_a_host_slot_is_not_lent_before_the_copy_into_it_has_ended(open_tier: OpenTier, layout: SlotLayout) -> None:
    tier = open_tier(layout, 3, 2)
    tier.slots.load(0, ExpertKey(12, 0))
    for expert in range(1, 4):
        key = ExpertKey(12, expert)
        _copy_meanwhile(tier, 0, 0)
        commit = tier.commit(0, 1, key)  # of what is written to the host slot after `keep`
        commit.wait()
        assert not tier.slots.wrong(1, key), "what was committed from it"
        assert not tier.wrong(0, 2, key), "what is in it later"


@pytest.mark.hook("alloc_host_slots", "commit_slot")
@pytest.mark.parametrize("copies", ["out of it", "into it"])
def test_a_discard_hides_no_copy_under_way_from_the_next_lease(open_tier: OpenTier, copies: str) -> None:
    tier = open_tier(LARGE, 3, 1)
    slots = tier.slots
    slots.load(2, ExpertKey(21, 99))
    for expert in range(0, 10, 2):
        before, after = ExpertKey(21, expert), ExpertKey(21, expert + 1)
        commits = [tier.commit(0, 0, before)]
        if copies == "out of it":
            commits += [tier.recommit(0, 0) for _ in range(COPIES_BEFORE)]
        else:
            _copy_meanwhile(tier, 2, 0)
        slots.store.discard(tier.host_slots.restage(0, 1))
        commits.append(tier.commit(0, 1, after))
        for commit in commits:
            commit.wait()
        assert not slots.wrong(0, before), "what was committed before the discard"
        assert not slots.wrong(1, after), "what was committed after it"
        assert not tier.wrong(0, 1, after), "what is kept then"


@pytest.mark.hook("alloc_host_slots", "commit_slot", "launch_read")
def test_keep_does_not_overtake_the_copy_out_of_its_host_slot(
    open_tier: OpenTier, launch_read: LaunchRead, streams: Sequence[int]
) -> None:
    tier = open_tier(SMALL, 3, 2)
    slots = tier.slots
    slots.load(0, ExpertKey(17, 0))
    slots.load(1, ExpertKey(17, 99))
    for expert in range(1, 4):
        read = launch_read(slots.store, 0, streams[0], READ_MS)
        slots.store.mark_read(0, streams[0])
        refill = tier.commit(1, 0, ExpertKey(17, expert))  # waits for the reader
        tier.host_slots.keep(1, 1)
        assert not slots.wrong_bytes(read(), ExpertKey(17, expert - 1)), "what the reader saw"
        refill.wait()
        assert not slots.wrong(0, ExpertKey(17, expert)), "what was committed from the host slot"
        assert not tier.wrong(1, 2, ExpertKey(17, 99)), "what was kept in it then"


@pytest.mark.hook("alloc_host_slots", "commit_slot")
def test_a_host_slot_is_lent_again_after_a_commit_from_it_failed(
    open_tier: OpenTier, break_next_commit: BreakNextCommit
) -> None:
    tier = open_tier(SMALL, 2, 2)
    tier.commit(1, 1, ExpertKey(13, 99)).wait()
    for expert in range(6):
        break_next_commit(tier.slots.store)
        with pytest.raises(CommitFailed):
            tier.commit(0, 0, ExpertKey(13, expert)).wait()
    tier.commit(0, 0, ExpertKey(13, 6)).wait()
    assert not tier.slots.wrong(0, ExpertKey(13, 6)), "the slot whose commits failed"
    assert not tier.wrong(0, 1, ExpertKey(13, 6)), "the host slot whose commits failed"
    assert not tier.wrong(1, 0, ExpertKey(13, 99)), "another host slot"


@pytest.mark.hook("alloc_host_slots", "commit_slot")
def test_two_stores_host_slots_keep_apart(open_tier: OpenTier) -> None:
    first, second = open_tier(SMALL, 2, 3), open_tier(SMALL, 2, 3)
    for host_slot in range(3):
        first.commit(host_slot, 0, ExpertKey(14, host_slot)).wait()
        second.commit(host_slot, 0, ExpertKey(15, host_slot)).wait()
    assert [first.wrong(host_slot, 1, ExpertKey(14, host_slot)) for host_slot in range(3)] == [""] * 3
    assert [second.wrong(host_slot, 1, ExpertKey(15, host_slot)) for host_slot in range(3)] == [""] * 3
    first.slots.store.close()
    second.host_slots.keep(1, 0)
    kept = [ExpertKey(15, 2), ExpertKey(15, 1), ExpertKey(15, 2)]
    assert [second.wrong(host_slot, 0, key) for host_slot, key in enumerate(kept)] == [""] * 3, "after a close"


@pytest.mark.hook("alloc_host_slots", "commit_slot")
@pytest.mark.parametrize(("layout", "rounds"), [(SMALL, 8), (LARGE, 2)], ids=["small", "large"])
def test_eight_fillers_at_once_mix_up_no_host_slots(open_tier: OpenTier, layout: SlotLayout, rounds: int) -> None:
    tier = open_tier(layout, 2 * FILLERS, 2 * FILLERS)
    slots = tier.slots
    together = Barrier(FILLERS)
    later: list[HostSlotsUnderTest] = []

    def keys(number: int, filler: int) -> tuple[ExpertKey, ExpertKey]:
        return ExpertKey(filler, number % 4), ExpertKey(filler, 4 + number % 2)

    # Each filler has two slots and two host slots of its own: for what is read, and for what is evicted.
    def read(number: int, filler: int) -> str:
        tier.commit(filler, filler, keys(number, filler)[0]).wait()
        return slots.wrong(filler, keys(number, filler)[0])

    def evict(number: int, filler: int) -> str:
        slots.load(FILLERS + filler, keys(number, filler)[1])
        tier.host_slots.keep(FILLERS + filler, FILLERS + filler)
        return ""

    def promote(number: int, filler: int) -> str:
        commits = [tier.recommit(filler, FILLERS + filler), tier.recommit(FILLERS + filler, filler)]
        for commit in commits:
            commit.wait()
        first, second = keys(number, filler)
        return slots.wrong(FILLERS + filler, first) or slots.wrong(filler, second)

    def at_once(step: Callable[[int, int], str], number: int, filler: int) -> str:
        together.wait()
        return step(number, filler)

    with ThreadPoolExecutor(FILLERS) as fillers:
        for number in range(rounds):
            for step in (read, evict, promote):
                wrongs = fillers.map(partial(at_once, step, number), range(FILLERS))
                later.append(slots.host_slots(1))  # the tier grows meanwhile
                assert list(wrongs) == [""] * FILLERS, f"{step.__name__}, round {number}"
    for piece in later:
        piece.commit(0, 0, ExpertKey(16, 0)).wait()
        assert not piece.wrong(0, 1, ExpertKey(16, 0)), "a piece that was made meanwhile"


@pytest.mark.hook("alloc_host_slots", "commit_slot")
def test_a_long_use_in_random_order_keeps_every_host_slot_right(
    open_tier: OpenTier, streams: Sequence[int], random_seed: int
) -> None:
    order = random.Random(random_seed)
    slot_count = 4
    tier = open_tier(SMALL, slot_count, 3)
    slots = tier.slots
    pieces = [tier, slots.host_slots(2)]
    host_slots = [(piece, number) for piece in pieces for number in range(piece.host_slots.slot_count)]
    held: dict[int, ExpertKey] = {}
    kept: dict[int, ExpertKey] = {}
    commits: dict[int, Commit] = {}
    for expert in range(400):
        slot, number = order.randrange(slot_count), order.randrange(len(host_slots))
        piece, host_slot = host_slots[number]
        match order.choice(["load", "commit", "recommit", "recommit", "keep", "keep", "discard", "read", "mark"]):
            case "load":
                held[slot] = ExpertKey(slot, expert % 5)
                commits[slot] = slots.commit(slot, held[slot])
            case "commit":
                held[slot] = kept[number] = ExpertKey(slot_count + number, expert % 5)
                commits[slot] = piece.commit(host_slot, slot, kept[number])
            case "recommit" if number in kept:
                held[slot] = kept[number]
                commits[slot] = piece.recommit(host_slot, slot)
            case "keep" if slot in held:
                commits[slot].wait()
                kept[number] = held[slot]
                piece.host_slots.keep(slot, host_slot)
            case "discard":
                kept.pop(number, None)
                held.pop(slot, None)
                piece.scribble(host_slot, slot)
            case "read" if slot in held:
                commits[slot].wait()
                assert not slots.wrong(slot, held[slot])
            case "mark" if slot in held:
                stream = order.choice(streams)
                commits[slot].order_before(stream)
                slots.store.mark_read(slot, stream)
    for commit in commits.values():
        commit.wait()
    assert {slot: slots.wrong(slot, key) for slot, key in held.items()} == dict.fromkeys(held, "")
    for number, key in kept.items():
        piece, host_slot = host_slots[number]
        assert not piece.wrong(host_slot, 0, key), f"host slot {host_slot} of {piece.host_slots.slot_count}"


def _span(staging: Staging) -> tuple[int, int]:
    """Where the bytes of a lease begin and end."""
    begin = np.frombuffer(staging.view, np.uint8).ctypes.data
    return begin, begin + len(staging.view)


def _copy_meanwhile(tier: HostSlotsUnderTest, slot: int, host_slot: int) -> None:
    """Start copies of a readable slot that are still under way when the next call is made."""
    for _ in range(COPIES_BEFORE):
        tier.host_slots.keep(slot, host_slot)
