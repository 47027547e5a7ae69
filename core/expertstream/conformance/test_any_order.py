"""Whatever the order of stage, commit, discard, wait and read, each slot holds its last committed expert.

hypothesis chooses the order. It is not asked for a shorter one that fails too: what a device does late once, it may do
in time when tried again.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from expertstream import Backend, Commit, ExpertKey, Staging
from expertstream.conformance.experts import SMALL, expert_bytes, layout_of_pages
from expertstream.conformance.plugin import OpenSlots
from expertstream.conformance.slots_under_test import SlotsUnderTest

SLOT_COUNT = 3
SLOTS = st.integers(0, SLOT_COUNT - 1)
LAYOUT = layout_of_pages(1, 2)


class FirstFailure:
    """What failed first, and where: all that is shown. hypothesis tries again what failed, and then it may not fail."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.where: TracebackType | None = None

    def remember(self, error: Exception) -> None:
        """Keep it, if it is the first."""
        if self.error is None:
            self.error, self.where = error, error.__traceback__

    def show(self) -> None:
        """Raise it again, if anything failed."""
        __tracebackhide__ = True
        if self.error is not None:
            raise self.error.with_traceback(self.where) from None


def remembered(step: Callable[..., None]) -> Callable[..., None]:
    """The step of a machine, which raises what failed first, whatever fails when it is tried again."""

    @functools.wraps(step)
    def remembering(machine: SlotsBesideADict, **arguments: Any) -> None:
        __tracebackhide__ = True
        try:
            step(machine, **arguments)
        except Exception as error:  # noqa: BLE001  # a backend may raise anything; the first is raised again
            machine.failure.remember(error)
            machine.failure.show()

    return remembering


class SlotsBesideADict(RuleBasedStateMachine):
    """Drives a store beside a plain dict of what each slot holds. All machines of one test share `failure`."""

    def __init__(self, backend: Backend, streams: Sequence[int], failure: FirstFailure) -> None:
        super().__init__()
        self.slots = SlotsUnderTest(backend, backend.alloc_slot_store(LAYOUT, SLOT_COUNT))
        self.streams = streams
        self.failure = failure
        self.held: dict[int, ExpertKey] = {}
        self.commits: dict[int, Commit] = {}
        self.leased: Staging | None = None
        self.experts_made = 0

    @precondition(lambda self: self.leased is None)
    @rule(slot=SLOTS, waits=st.booleans())
    @remembered
    def stage(self, slot: int, waits: bool) -> None:
        if waits:
            self.wait_and_read(slot=slot)
        self.commits.pop(slot, None)
        self.held.pop(slot, None)
        self.leased = self.slots.store.stage(slot)

    @precondition(lambda self: self.leased is None)
    @rule(slot=SLOTS, waits=st.booleans())
    @remembered
    def refill(self, slot: int, waits: bool) -> None:
        self.stage(slot=slot, waits=waits)
        self.fill_and_commit()

    @precondition(lambda self: self.leased is not None)
    @rule()
    @remembered
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
    @remembered
    def scribble_and_discard(self) -> None:
        assert self.leased is not None
        self.leased.view[:] = b"\xe5" * LAYOUT.slot_bytes
        self.slots.store.discard(self.leased)
        self.leased = None

    @rule(slot=SLOTS)
    @remembered
    def wait_and_read(self, slot: int) -> None:
        if slot in self.held:
            if slot in self.commits:
                self.commits[slot].wait()
            assert not self.slots.wrong(slot, self.held[slot])

    @rule(slot=SLOTS, number=st.integers(0, 7))
    @remembered
    def order_and_mark(self, slot: int, number: int) -> None:
        if slot in self.held:
            stream = self.streams[number % len(self.streams)]
            if slot in self.commits:
                self.commits[slot].order_before(stream)
            self.slots.store.mark_read(slot, stream)

    @remembered
    def teardown(self) -> None:
        try:
            if self.leased is not None:
                self.slots.store.discard(self.leased)
            for slot in self.held:
                self.wait_and_read(slot=slot)
        finally:
            self.slots.store.close()
        self.failure.show()  # also where all went well this time


@pytest.mark.hook("alloc_slot_store", "commit_slot")
def test_any_order_of_calls_leaves_the_last_committed_expert(
    backend: Backend, streams: Sequence[int], random_seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPOTHESIS_STORAGE_DIRECTORY", str(tmp_path))  # else it makes a folder where this is run
    failure = FirstFailure()
    order = settings(
        max_examples=40,
        stateful_step_count=25,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    machine = seed(random_seed)(lambda: SlotsBesideADict(backend, streams, failure))
    try:
        run_state_machine_as_test(machine, settings=order)  # type: ignore[arg-type]  # it calls what it is given
    except Exception:
        failure.show()  # without the frames of hypothesis
        raise


@pytest.mark.hook("alloc_slot_store", "commit_slot")
def test_a_long_use_in_random_order_keeps_every_slot_right(open_slots: OpenSlots, random_seed: int) -> None:
    order = random.Random(random_seed)
    slots = open_slots(SMALL, 9)
    held: dict[int, ExpertKey] = {}
    commits: dict[int, Commit] = {}
    for expert in range(400):
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
