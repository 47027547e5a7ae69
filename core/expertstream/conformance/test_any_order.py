"""Whatever the order of stage, commit, discard, wait and read, each slot holds its last committed expert."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from expertstream import Backend, Commit, ExpertKey, Staging
from expertstream.conformance.experts import SMALL, expert_bytes, layout_of_pages
from expertstream.conformance.plugin import OpenSlots
from expertstream.conformance.slots_under_test import SlotsUnderTest

SLOT_COUNT = 3
SLOTS = st.integers(0, SLOT_COUNT - 1)
LAYOUT = layout_of_pages(1, 2)


class SlotsBesideADict(RuleBasedStateMachine):
    """Drives a store beside a plain dict of what each slot holds."""

    def __init__(self, backend: Backend, streams: Sequence[int]) -> None:
        super().__init__()
        self.slots = SlotsUnderTest(backend, backend.alloc_slot_store(LAYOUT, SLOT_COUNT))
        self.streams = streams
        self.held: dict[int, ExpertKey] = {}
        self.commits: dict[int, Commit] = {}
        self.leased: Staging | None = None
        self.experts_made = 0

    @initialize()
    def nothing_is_leased(self) -> None:
        assert self.slots.store.slot_count == SLOT_COUNT

    @precondition(lambda self: self.leased is None)
    @rule(slot=SLOTS)
    def stage(self, slot: int) -> None:
        if slot in self.commits:
            self.commits.pop(slot).wait()  # the core refills no slot whose commit is under way
        self.held.pop(slot, None)
        self.leased = self.slots.store.stage(slot)

    @precondition(lambda self: self.leased is not None)
    @rule()
    def fill_and_commit(self) -> None:
        assert self.leased is not None
        key = ExpertKey(self.leased.slot, self.experts_made)
        self.experts_made += 1
        self.leased.view[:] = expert_bytes(LAYOUT, key)
        self.held[self.leased.slot] = key
        self.commits[self.leased.slot] = self.slots.backend.commit_slot(self.slots.store, self.leased)
        self.leased = None

    @precondition(lambda self: self.leased is not None)
    @rule()
    def scribble_and_discard(self) -> None:
        assert self.leased is not None
        self.leased.view[:] = b"\xe5" * LAYOUT.slot_bytes
        self.slots.store.discard(self.leased)
        self.leased = None

    @rule(slot=SLOTS)
    def wait_and_read(self, slot: int) -> None:
        if slot in self.held:
            if slot in self.commits:
                self.commits[slot].wait()
            assert not self.slots.wrong(slot, self.held[slot])

    @rule(slot=SLOTS, data=st.data())
    def order_and_mark(self, slot: int, data: st.DataObject) -> None:
        if slot in self.held:
            stream = data.draw(st.sampled_from(self.streams))
            if slot in self.commits:
                self.commits[slot].order_before(stream)
            self.slots.store.mark_read(slot, stream)

    def teardown(self) -> None:
        if self.leased is not None:
            self.slots.store.discard(self.leased)
        try:
            for slot in self.held:
                self.wait_and_read(slot)
        finally:
            self.slots.store.close()


@pytest.mark.hook("alloc_slot_store", "commit_slot")
def test_any_order_of_calls_leaves_the_last_committed_expert(backend: Backend, streams: Sequence[int]) -> None:
    run_state_machine_as_test(
        lambda: SlotsBesideADict(backend, streams),  # type: ignore[arg-type]  # it calls what it is given
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@settings(max_examples=2, phases=[Phase.generate], deadline=None, database=None, print_blob=True)
@given(seed=st.integers(0, 2**32))
def _soak(slots: SlotsUnderTest, seed: int) -> None:
    order = random.Random(seed)
    held: dict[int, ExpertKey] = {}
    commits: dict[int, Commit] = {}
    for expert in range(200):
        slot = order.randrange(slots.store.slot_count)
        if slot in commits:
            commits.pop(slot).wait()
        match order.choice(["commit", "commit", "commit", "discard", "read", "read"]):
            case "commit":
                held[slot] = ExpertKey(slot, expert % 7)
                commits[slot] = slots.commit(slot, held[slot])
            case "discard":
                held.pop(slot, None)
                slots.scribble(slot)
            case "read" if slot in held:
                assert not slots.wrong(slot, held[slot])
    for commit in commits.values():
        commit.wait()
    assert {slot: slots.wrong(slot, key) for slot, key in held.items()} == dict.fromkeys(held, "")


@pytest.mark.hook("alloc_slot_store", "commit_slot")
def test_a_long_use_in_random_order_keeps_every_slot_right(open_slots: OpenSlots) -> None:
    _soak(open_slots(SMALL, 9))
