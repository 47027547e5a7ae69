"""A budget is honest: never more than was asked, and never room that something else has taken."""

from __future__ import annotations

import re

import pytest

from expertstream import Backend
from expertstream.conformance.experts import ONE_PAGE, SMALL
from expertstream.conformance.plugin import OpenSlots

MIB = 1 << 20
EVERYTHING = 1 << 60  # bytes; more than any machine has


def granted(
    backend: Backend, expert_bytes: int, resident_bytes: int, asked: int | None, other_slots_bytes: int = 0
) -> int:
    """The backend's own answer, before the core's check of it."""
    budget = backend.hooks.budget_for_expert_size(
        expert_bytes=expert_bytes, resident_bytes=resident_bytes, asked=asked, other_slots_bytes=other_slots_bytes
    )
    assert budget.slots >= 0
    return int(budget.slots)


@pytest.mark.hook("budget_for_expert_size")
@pytest.mark.parametrize("asked", [1, 2, 7, 10_000])
@pytest.mark.parametrize("expert_bytes", [4096, SMALL.slot_bytes, 3 * MIB + 4096, 512 * MIB])
def test_a_budget_is_never_more_than_was_asked(backend: Backend, expert_bytes: int, asked: int) -> None:
    assert granted(backend, expert_bytes, 0, asked) <= asked


@pytest.mark.hook("budget_for_expert_size")
def test_zero_slots_asked_for_are_zero_slots(backend: Backend) -> None:
    assert granted(backend, 4096, 0, 0) == 0


@pytest.mark.hook("budget_for_expert_size")
@pytest.mark.parametrize("asked", [None, 0, 3])
def test_a_budget_says_why_in_numbers(backend: Backend, asked: int | None) -> None:
    budget = backend.budget_for_expert_size(SMALL.slot_bytes, 3 * MIB, asked)
    assert re.search(r"\d", budget.reason), f"the reason names no number: {budget.reason!r}"


@pytest.mark.hook("budget_for_expert_size")
@pytest.mark.parametrize("asked", [None, 1])
def test_an_expert_larger_than_the_memory_gets_no_slot(backend: Backend, asked: int | None) -> None:
    assert granted(backend, EVERYTHING, 0, asked) == 0


@pytest.mark.hook("budget_for_expert_size")
@pytest.mark.parametrize("asked", [None, 1])
def test_resident_bytes_that_take_everything_leave_no_slot(backend: Backend, asked: int | None) -> None:
    assert granted(backend, 4096, EVERYTHING, asked) == 0


# Free memory changes between two questions, so what follows compares with a wide margin.


@pytest.mark.hook("budget_for_expert_size")
def test_a_budget_shrinks_by_what_is_resident(backend: Backend) -> None:
    alone = granted(backend, MIB, 0, None)
    assert alone > 0, "no slot is granted beside nothing: there is no memory to test with"
    half_bytes = alone * MIB // 2  # of slots: what else is resident need not count where slots alone have a limit
    assert granted(backend, MIB, half_bytes, None, half_bytes) <= alone * 3 // 4


@pytest.mark.hook("budget_for_expert_size")
def test_a_budget_counts_in_slots_of_the_size_asked_about(backend: Backend) -> None:
    alone = granted(backend, MIB, 0, None)
    assert alone > 0, "no slot is granted beside nothing: there is no memory to test with"
    assert granted(backend, 2 * MIB, 0, None) <= alone * 3 // 4


@pytest.mark.hook("budget_for_expert_size", "alloc_slot_store")
def test_granted_slots_can_be_allocated(backend: Backend, open_slots: OpenSlots) -> None:
    slot_count = granted(backend, SMALL.slot_bytes, 0, 9)
    if slot_count == 0:
        pytest.fail("no slot is granted beside nothing: there is no memory to test with")
    assert open_slots(SMALL, slot_count).store.slot_count == slot_count


@pytest.mark.hook("budget_for_expert_size", "alloc_slot_store")
def test_slots_granted_beside_slots_of_another_size_can_be_allocated_with_them(
    backend: Backend, open_slots: OpenSlots
) -> None:
    small_count = granted(backend, SMALL.slot_bytes, ONE_PAGE.slot_bytes, 9, ONE_PAGE.slot_bytes)
    small_bytes = small_count * SMALL.slot_bytes
    page_count = granted(backend, ONE_PAGE.slot_bytes, small_bytes, 9, small_bytes)
    if small_count == 0 or page_count == 0:
        pytest.fail(f"{small_count} and {page_count} slots are granted: there is no memory to test with")
    assert open_slots(SMALL, small_count).store.slot_count == small_count
    assert open_slots(ONE_PAGE, page_count).store.slot_count == page_count
