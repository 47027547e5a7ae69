"""A backend that chooses what is loaded first chooses among the hottest, each once, and no more than fit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from expertstream import Backend, ExpertKey

HOTTEST = tuple(ExpertKey(layer, expert) for expert in (5, 0, 3, 9) for layer in (2, 0, 1))
SLOT_COUNTS = pytest.mark.parametrize("slot_count", [0, 1, 5, len(HOTTEST), 40])


def seeds(backend: Backend, hottest: Sequence[ExpertKey], slot_count: int) -> list[ExpertKey]:
    """The backend's own answer, before the core's check of it."""
    return list(backend.hooks.seed_experts(hottest=hottest, slot_count=slot_count))


@pytest.mark.hook("seed_experts")
@SLOT_COUNTS
def test_seeds_are_no_more_than_the_slots(backend: Backend, slot_count: int) -> None:
    assert len(seeds(backend, HOTTEST, slot_count)) <= slot_count


@pytest.mark.hook("seed_experts")
@SLOT_COUNTS
def test_no_seed_is_named_twice(backend: Backend, slot_count: int) -> None:
    chosen = seeds(backend, HOTTEST, slot_count)
    assert len(set(chosen)) == len(chosen)


@pytest.mark.hook("seed_experts")
@SLOT_COUNTS
def test_every_seed_is_one_of_the_hottest(backend: Backend, slot_count: int) -> None:
    assert set(seeds(backend, HOTTEST, slot_count)) <= set(HOTTEST)


@pytest.mark.hook("seed_experts")
def test_nothing_hot_seeds_nothing(backend: Backend) -> None:
    assert seeds(backend, [], 5) == []


@pytest.mark.hook("seed_experts")
def test_the_list_of_the_hottest_is_left_as_it_is(backend: Backend) -> None:
    hottest = list(HOTTEST)
    seeds(backend, hottest, 5)
    assert hottest == list(HOTTEST)
