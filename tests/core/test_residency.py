"""The compiled layer step beside a plain dictionary that does the same slowly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertstream import residency
from expertstream.policies import make_policy, policy_names

LAYERS, EXPERTS = 3, 6


def make(slots_of_class: tuple[int, int] = (4, 3)) -> residency.Tables:
    """Layers 0 and 2 share the first class, layer 1 has the second."""
    first, second = slots_of_class
    return residency.make_tables(LAYERS, EXPERTS, np.array([[0, first], [first, first + second], [0, first]], np.int64))


def lease(
    tables: residency.Tables, ranks: residency.Ranks, layer: int, experts: list[int]
) -> tuple[int, list[int], list[int]]:
    slots, found = np.full(len(experts), -9, np.int64), np.full(len(experts), 9, np.uint8)
    answer = residency.lease(tables, ranks, layer, np.array(experts, np.int64), slots, found)
    return answer, slots.tolist(), found.tolist()


def load(tables: residency.Tables, ranks: residency.Ranks, layer: int, experts: list[int]) -> list[int]:
    """Lease, publish and release: the experts are in slots afterwards."""
    answer, slots, _ = lease(tables, ranks, layer, experts)
    assert answer >= 0
    for slot in slots:
        residency.publish(tables, slot)
    residency.release(tables, np.array(slots))
    return slots


class Model:
    """The same promises in plain Python: which expert is in which slot, and who may go."""

    def __init__(self, tables: residency.Tables) -> None:
        self.range = [tuple(map(int, pair)) for pair in tables.slot_range]
        self.slot_of: dict[tuple[int, int], int] = {}
        self.leases = [0] * len(tables.state)
        self.score: dict[tuple[int, int], tuple[float, int]] = {}

    def victims(self, layer: int) -> list[int]:
        expert_of = {slot: key for key, slot in self.slot_of.items()}
        free = [slot for slot in range(*self.range[layer]) if not self.leases[slot]]
        empty = [slot for slot in free if slot not in expert_of]
        taken = [slot for slot in free if slot in expert_of]
        return empty + sorted(taken, key=lambda slot: self.score.get(expert_of[slot], (0.0, 0)))

    def lease(self, layer: int, experts: list[int]) -> list[int] | None:
        missing = [expert for expert in experts if (layer, expert) not in self.slot_of]
        held = [self.slot_of[layer, expert] for expert in experts if (layer, expert) in self.slot_of]
        victims = [slot for slot in self.victims(layer) if slot not in held][: len(missing)]
        if len(victims) < len(missing):
            return None
        for expert, slot in zip(missing, victims, strict=True):
            self.slot_of = {key: other for key, other in self.slot_of.items() if other != slot}
            self.slot_of[layer, expert] = slot
        slots = [self.slot_of[layer, expert] for expert in experts]
        for slot in slots:
            self.leases[slot] += 1
        return slots


steps = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=5, unique=True),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.sampled_from(policy_names()))
def test_any_sequence_of_steps_gives_the_slots_that_the_plain_model_gives(
    steps: list[tuple[int, list[int], bool]], name: str
) -> None:
    tables = make()
    policy = make_policy(name, LAYERS * EXPERTS, 4 if name == "hotness" else None)
    model = Model(tables)
    held: list[list[int]] = []
    clock = 0
    tokens = 0
    ones = np.ones(EXPERTS, np.int64)
    for layer, experts, keep in steps:
        policy.begin_pass(1)
        tokens += 1
        if name == "hotness" and tokens % 4 == 0:
            model.score = {key: (score / 2, last) for key, (score, last) in model.score.items()}
        slots, found = np.zeros(len(experts), np.int64), np.zeros(len(experts), np.uint8)
        answer = policy.layer_step(tables, policy.ranks, layer, np.array(experts), ones, slots, found)
        expected = model.lease(layer, experts)
        if expected is None:
            assert answer == residency.EXHAUSTED
            for other in held:
                residency.release(tables, np.array(other))
                for slot in other:
                    model.leases[slot] -= 1
            held = []
            continue
        assert sorted(slots.tolist()) == sorted(expected)
        assert slots.tolist() == expected
        clock += 1
        for expert in experts:
            score, _ = model.score.get((layer, expert), (0.0, 0))
            model.score[layer, expert] = (score + 1 if name == "hotness" else 0.0, clock)
        for slot in slots.tolist():
            residency.publish(tables, slot)
        if keep:
            held.append(slots.tolist())
        else:
            residency.release(tables, slots)
            for slot in slots.tolist():
                model.leases[slot] -= 1
        assert tables.leases.tolist() == model.leases
        resident = {
            (int(expert) // EXPERTS, int(expert) % EXPERTS): slot
            for slot, expert in enumerate(tables.expert_of)
            if expert >= 0
        }
        assert resident == model.slot_of


def test_a_full_hit_needs_no_waiting_and_changes_no_slot() -> None:
    tables, ranks = make(), residency.make_ranks(LAYERS * EXPERTS)
    slots = load(tables, ranks, 0, [5, 1])
    assert lease(tables, ranks, 0, [1, 5]) == (0, slots[::-1], [residency.READY] * 2)
    assert tables.leases[slots].tolist() == [1, 1]


def test_a_leased_or_loading_slot_is_never_a_victim() -> None:
    tables, ranks = make(), residency.make_ranks(LAYERS * EXPERTS)
    _, loading, _ = lease(tables, ranks, 0, [0, 1])  # leased and still loading
    residency.release(tables, np.array(loading[1:]))  # loading, but no longer leased
    answer, slots, found = lease(tables, ranks, 2, [0, 1])
    assert (answer, found) == (2, [residency.MISS] * 2)
    assert set(slots).isdisjoint(loading)
    before = [array.copy() for array in tables[:-2]]  # all but what the last lease leaves behind
    assert lease(tables, ranks, 2, [2])[0] == residency.EXHAUSTED
    for array, copy in zip(tables[:-2], before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_a_step_that_cannot_have_all_its_slots_gets_none() -> None:
    tables, ranks = make(), residency.make_ranks(LAYERS * EXPERTS)
    load(tables, ranks, 1, [0])
    before = [array.copy() for array in tables[:-2]]  # all but what the last lease leaves behind
    assert lease(tables, ranks, 1, [0, 1, 2, 3])[0] == residency.EXHAUSTED
    for array, copy in zip(tables[:-2], before, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("expert", [-1, EXPERTS, 1 << 40])
def test_an_expert_that_does_not_exist_is_refused(expert: int) -> None:
    tables, ranks = make(), residency.make_ranks(LAYERS * EXPERTS)
    assert lease(tables, ranks, 0, [expert])[0] == residency.OUT_OF_RANGE


def test_a_failed_load_gives_the_slot_back() -> None:
    tables, ranks = make((2, 1)), residency.make_ranks(LAYERS * EXPERTS)
    for _ in range(10):
        answer, slots, found = lease(tables, ranks, 0, [3, 4])
        assert (answer, found) == (2, [residency.MISS] * 2)
        for slot in slots:
            residency.forget(tables, slot, quarantine=False)
        residency.release(tables, np.array(slots))
    assert residency.free_slots(tables, 0, False) == 2
    assert (tables.slot_of == -1).all()


def test_a_quarantined_slot_is_not_used_again() -> None:
    tables, ranks = make((2, 1)), residency.make_ranks(LAYERS * EXPERTS)
    _, slots, _ = lease(tables, ranks, 0, [3])
    residency.forget(tables, slots[0], quarantine=True)
    residency.release(tables, np.array(slots))
    assert residency.free_slots(tables, 0, False) == 1
    assert slots[0] not in load(tables, ranks, 0, [0]) + load(tables, ranks, 0, [1])


def test_an_expert_named_twice_has_one_slot_and_two_leases() -> None:
    tables, ranks = make(), residency.make_ranks(LAYERS * EXPERTS)
    answer, slots, found = lease(tables, ranks, 0, [2, 2])
    assert answer == 2
    assert slots[0] == slots[1]
    assert found == [residency.MISS, residency.UNDERWAY]
    assert tables.leases[slots[0]] == 2


def test_what_the_step_needs_later_goes_last_and_the_farthest_first() -> None:
    tables, ranks = make((3, 1)), residency.make_ranks(LAYERS * EXPERTS)
    near, far = load(tables, ranks, 0, [1])[0], load(tables, ranks, 0, [2])[0]
    other = load(tables, ranks, 2, [0])[0]
    assert residency.announce(tables, 0, np.array([0, 1, 2]), True) == 2
    assert lease(tables, ranks, 0, [0])[1] == [other]  # needed by nobody, although used last
    assert lease(tables, ranks, 0, [3])[1] == [far]
    assert lease(tables, ranks, 0, [4])[1] == [near]


def test_hotness_keeps_what_is_chosen_often_and_forgets_what_was() -> None:
    policy = make_policy("hotness", LAYERS * EXPERTS, half_life_tokens=2)
    tables = make((2, 1))
    for _ in range(3):
        policy.begin_pass(1)
        policy.select(policy.ranks, 0, np.array([0]), np.ones(1, np.int64))
    policy.select(policy.ranks, 0, np.array([1]), np.ones(1, np.int64))
    load(tables, policy.ranks, 0, [0, 1])
    cold = int(tables.slot_of[1])
    assert lease(tables, policy.ranks, 0, [2])[1] == [cold]
    for _ in range(20):
        policy.begin_pass(1)
    assert policy.ranks.rank[0] < 0.01


def test_hotness_after_a_long_prompt_is_what_decoding_at_its_rates_settles_at() -> None:
    half_life = 16
    prefill, decode = (make_policy("hotness", 2, half_life) for _ in range(2))
    prefill.begin_pass(4000)
    prefill.select(prefill.ranks, 0, np.array([0, 1]), np.array([4000, 1000]))
    for token in range(half_life * 40 - 1):  # to just before a halving
        decode.begin_pass(1)
        decode.select(decode.ranks, 0, np.array([0]), np.ones(1, np.int64))
        if token % 4 == 0:
            decode.select(decode.ranks, 0, np.array([1]), np.ones(1, np.int64))
    np.testing.assert_allclose(prefill.ranks.rank, decode.ranks.rank, rtol=0.1)


@pytest.mark.parametrize("name", policy_names())
def test_prefill_over_every_expert_leaves_what_decode_used(name: str) -> None:
    policy = make_policy(name, LAYERS * EXPERTS, 1000 if name == "hotness" else None)
    tables = make((4, 1))
    for _ in range(50):
        policy.begin_pass(1)
        policy.select(policy.ranks, 0, np.array([1, 3]), np.ones(2, np.int64))
    load(tables, policy.ranks, 0, [1, 3])
    policy.begin_pass(64)
    everyone = np.arange(EXPERTS)
    policy.select(policy.ranks, 2 * EXPERTS, everyone, np.full(EXPERTS, 20))
    for expert in everyone.tolist():
        load(tables, policy.ranks, 2, [expert])
    assert tables.slot_of[1] >= 0
    assert tables.slot_of[3] >= 0


@pytest.mark.parametrize("name", policy_names())
def test_the_prompts_hot_experts_are_still_there_when_decode_begins(name: str) -> None:
    policy = make_policy(name, LAYERS * EXPERTS)
    tables = make((3, 1))
    policy.begin_pass(300)
    counts = np.array([1, 200, 2, 3, 150, 4])
    policy.select(policy.ranks, 0, np.arange(EXPERTS), counts)
    for expert in range(EXPERTS):
        load(tables, policy.ranks, 0, [expert])
    assert tables.slot_of[1] >= 0
    assert tables.slot_of[4] >= 0


def held(tables: residency.Tables) -> dict[int, int]:
    """Expert to slot, by the slots."""
    return {int(expert): slot for slot, expert in enumerate(tables.expert_of) if expert >= 0}


@given(
    st.booleans(),
    st.lists(
        st.tuples(
            st.integers(0, LAYERS - 1),
            st.lists(st.integers(0, EXPERTS - 1), max_size=4, unique=True),
            st.lists(st.integers(0, EXPERTS - 1), max_size=4, unique=True),
            st.lists(st.integers(0, EXPERTS - 1), max_size=2, unique=True),
            st.booleans(),
        ),
        max_size=30,
    ),
)
def test_an_exchange_keeps_what_leaves_and_gives_up_only_what_the_kind_of_tier_may(
    is_exclusive: bool, steps: list[tuple[int, list[int], list[int], list[int], bool]]
) -> None:
    """Against a plain account of which experts are kept, and which of them are readable elsewhere too."""
    tables, ranks = make(), residency.make_ranks(LAYERS * EXPERTS)
    for number, (layer, coming, leaving, later, arrives) in enumerate(steps):
        leaving = [expert for expert in leaving if expert not in coming] if is_exclusive else []
        size = max(len(coming), len(leaving)) if is_exclusive else 0
        if not coming:
            continue
        ranks.rank[:] = (np.arange(LAYERS * EXPERTS) * 7 + number) % 5
        state = {expert: int(tables.state[slot]) for expert, slot in held(tables).items()}
        first, end = tables.slot_range[layer]
        base = layer * EXPERTS
        slots, found = np.full(len(coming), -1, np.int64), np.empty(len(coming), np.uint8)
        taken = np.empty(size, np.int64)
        numbers = [base + expert for expert in leaving] + [-1] * (size - len(leaving))
        residency.announce(tables, layer, np.array(later, np.int64), True)
        residency.exchange(
            tables,
            ranks,
            layer,
            np.array(coming, np.int64),
            np.array(numbers, np.int64),
            slots,
            found,
            taken,
            is_exclusive,
        )
        residency.announce(tables, layer, np.array(later, np.int64), False)
        after = held(tables)
        assert len(set(after.values())) == len(after)
        assert all(tables.slot_of[expert] == slot for expert, slot in after.items())
        for expert, slot, how in zip(coming, slots.tolist(), found.tolist(), strict=True):
            was = state.get(base + expert)
            assert (how == residency.READY) == (was in (residency.READABLE, residency.SPARE))
            assert slot < 0 or first <= slot < end
            if slot >= 0:
                assert after[base + expert] == slot
                assert tables.leases[slot] == 1
        for expert, slot in zip(numbers, taken.tolist(), strict=True):
            if expert >= 0 and state.get(expert) is not None:
                assert slot == -1
                assert expert not in after or tables.state[after[expert]] != residency.SPARE
            elif expert >= 0 and slot >= 0:
                assert after[expert] == slot
                assert tables.state[slot] == residency.LOADING
        # What was readable nowhere else goes only for something that would be lost too, or is read for an inclusive
        # tier, and what the step will need never goes.
        lost = [expert for expert, was in state.items() if was == residency.READABLE and expert not in after]
        read = 0 if is_exclusive else int(np.count_nonzero((slots >= 0) & (found == residency.MISS)))
        assert len(lost) <= int(np.count_nonzero(taken >= 0)) + read
        assert {base + expert for expert in later} & state.keys() <= after.keys()
        for slot in taken[taken >= 0].tolist():
            tables.state[slot], tables.leases[slot] = residency.READABLE, 0
        for slot in slots[slots >= 0].tolist():
            tables.leases[slot] = 0
            if arrives:
                tables.state[slot] = residency.SPARE if is_exclusive else residency.READABLE
            else:
                residency.forget(tables, slot, quarantine=False)
    assert not tables.leases.any()
