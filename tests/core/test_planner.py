"""A plan keeps what was asked for to the byte, or the refusal says the sum and what would do."""

import json
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from expertstream.checkpoint.index import Checkpoint, ExpertLayer, ExpertPart
from expertstream.config import HostTiering
from expertstream.errors import BackendContractError, BudgetTooSmall, ConfigError, DoesNotFit
from expertstream.machine import AvailableMemory
from expertstream.planner import Demand, Plan, make_plan
from expertstream.size_classes import size_classes
from expertstream.slots import SlotBudget
from expertstream.units import MemoryRequest, round_down_bytes, round_up_bytes

GIB = 1 << 30
NOTHING = Demand(resident_bytes=0, kv_cache_bytes=0, workspace_bytes=0, context_tokens=0)
DEMAND = Demand(resident_bytes=1_000_001, kv_cache_bytes=200_002, workspace_bytes=30_003, context_tokens=512)

LayerShape = tuple[int, int, int]
"""Bytes of one expert's gate and down parts, and the number of experts."""


def checkpoint_of(shapes: list[LayerShape], experts_per_token: int = 2) -> Checkpoint:
    """Layers one after the other; all parts begin at multiples of 4096, so a room is its part rounded up."""
    layers = []
    offset = 0
    for number, (gate_bytes, down_bytes, expert_count) in enumerate(shapes):
        parts = []
        for name, expert_bytes in (("gate", gate_bytes), ("down", down_bytes)):
            stride = rounded_up(expert_bytes)
            offsets = offset + stride * np.arange(expert_count, dtype=np.int64)
            offset += stride * expert_count
            files = np.zeros(expert_count, dtype=np.int32)
            parts.append(ExpertPart(name, "F32", (expert_bytes // 4, 1), expert_bytes, files, offsets))
        layers.append(ExpertLayer(number, expert_count, tuple(parts)))
    return Checkpoint((Path("model"),), {}, {}, tuple(layers), experts_per_token, "made up", ())


def rounded_up(byte_count: int) -> int:
    return (byte_count + 4095) // 4096 * 4096


def available(byte_count: int) -> AvailableMemory:
    return AvailableMemory(byte_count, f"the test says {byte_count} bytes", byte_count)


class Backend:
    """Grants what `grant(expert_bytes, resident_bytes, asked)` says, by default everything.

    With `staging_count` a store takes so many buffers of a slot's size beside its slots.
    """

    name = "test"

    def __init__(
        self,
        *,
        one_pool: bool = True,
        has_host_tier: bool = False,
        staging_count: int = 0,
        grant: Callable[[int, int, int], int] = lambda *asked: asked[2],
    ) -> None:
        self.one_pool = one_pool
        self.has_host_tier = has_host_tier
        self.staging_count = staging_count
        self.grant = grant
        self.calls: list[tuple[int, int, int]] = []
        self.other_slots_bytes: list[int] = []

    def host_memory_is_device_addressable(self) -> bool:
        return self.one_pool

    def budget_for_expert_size(
        self, expert_bytes: int, resident_bytes: int, asked: int | None, other_slots_bytes: int
    ) -> SlotBudget:
        assert asked is not None
        self.calls.append((expert_bytes, resident_bytes, asked))
        self.other_slots_bytes.append(other_slots_bytes)
        slots = self.grant(expert_bytes, resident_bytes, asked)
        return SlotBudget(slots, "the test's backend says so", self.staging_count * expert_bytes)


def plan_for(
    checkpoint: Checkpoint,
    request: str | None,
    *,
    demand: Demand = NOTHING,
    backend: Backend | None = None,
    available_bytes: int = 1 << 60,
    host: str | None = None,
    host_tiering: HostTiering | None = None,
) -> Plan:
    parsed, parsed_host = (None if text is None else MemoryRequest.parse(text) for text in (request, host))
    return make_plan(
        checkpoint,
        demand,
        parsed,
        backend or Backend(),
        available(available_bytes),
        host_request=parsed_host,
        host_tiering=host_tiering,
    )


def slot_counts(plan: Plan) -> list[int]:
    return [planned.slot_count for planned in plan.classes]


# Layers 0 to 2 are smaller than layer 3, as published files mix them. A slot is its parts, each rounded up to 4096.
MIXED = checkpoint_of([(33792, 21504, 8)] * 3 + [(73728, 36864, 8)])
SMALL_SLOT, LARGE_SLOT = 61440, 110592
SMALLEST = 2 * SMALL_SLOT + 2 * LARGE_SLOT


def test_mixed_layers_are_planned_with_their_true_bytes() -> None:
    plan = plan_for(MIXED, "all")
    assert plan.routed_bytes == 2_211_840
    assert [(planned.slot_bytes, planned.slot_count) for planned in plan.classes] == [(SMALL_SLOT, 24), (LARGE_SLOT, 8)]
    assert plan.expert_memory_bytes == 24 * SMALL_SLOT + 8 * LARGE_SLOT < 32 * LARGE_SLOT


def test_all_gives_every_expert_a_slot_though_padding_makes_it_more_than_the_routed_bytes() -> None:
    for request in ("all", "100%"):
        plan = plan_for(MIXED, request)
        assert slot_counts(plan) == [24, 8]
        assert plan.expert_memory_bytes > plan.routed_bytes


@pytest.mark.parametrize("slots_of_a_layer", [0, 1])
def test_less_than_one_step_needs_is_refused_with_the_smallest_budget(slots_of_a_layer: int) -> None:
    uniform = checkpoint_of([(4096, 4096, 8)] * 4)
    with pytest.raises(BudgetTooSmall, match=r"Ask for 16KiB \(16384 bytes\) or more") as refusal:
        plan_for(uniform, str(slots_of_a_layer * 8192))
    assert refusal.value.smallest_bytes == 16384
    assert f"is {slots_of_a_layer * 8192} bytes" in str(refusal.value)
    assert "2 slots of 8192 bytes for layers 0-3" in str(refusal.value)


@given(st.integers(4096, 1 << 50))
def test_the_amounts_that_refusals_name_can_be_typed_and_err_on_the_safe_side(byte_count: int) -> None:
    for rounded in (round_up_bytes(byte_count), round_down_bytes(byte_count)):
        typed = str(MemoryRequest(size_bytes=rounded))
        assert MemoryRequest.parse(typed).size_bytes == rounded
        assert len(typed) <= len("9999MiB")
    assert round_down_bytes(byte_count) <= byte_count <= round_up_bytes(byte_count)


def test_a_size_without_its_unit_is_asked_back() -> None:
    with pytest.raises(BudgetTooSmall, match=r"or more; did you mean 8GiB\?$"):
        plan_for(MIXED, "8")


def test_exactly_the_smallest_budget_is_accepted_and_a_byte_less_is_not() -> None:
    plan = plan_for(MIXED, str(SMALLEST))
    assert slot_counts(plan) == [2, 2]
    assert plan.expert_memory_bytes == plan.smallest_bytes == SMALLEST
    with pytest.raises(BudgetTooSmall) as refusal:
        plan_for(MIXED, str(SMALLEST - 1))
    assert refusal.value.smallest_bytes == SMALLEST
    assert f"2 slots of {SMALL_SLOT} bytes for layers 0-2, 2 slots of {LARGE_SLOT} bytes for layer 3" in str(
        refusal.value
    )


def test_a_percentage_too_small_is_refused_in_bytes_too() -> None:
    with pytest.raises(BudgetTooSmall, match=r"expert memory of 1% is 22118 bytes"):
        plan_for(MIXED, "1%")


def test_the_budget_is_spent_evenly_and_the_rest_where_a_slot_still_fits() -> None:
    """Half of both classes would be 12 and 4; what is left pays for one more small slot and no large one."""
    budget = 12 * SMALL_SLOT + 4 * LARGE_SLOT + LARGE_SLOT - 1
    plan = plan_for(MIXED, str(budget))
    assert slot_counts(plan) == [13, 4]


def test_a_budget_beyond_every_expert_leaves_the_rest_alone() -> None:
    plan = plan_for(MIXED, "1TB", available_bytes=24 * SMALL_SLOT + 8 * LARGE_SLOT)
    assert slot_counts(plan) == [24, 8]


def test_one_pool_accepts_the_exact_sum_and_refuses_one_byte_more() -> None:
    total = DEMAND.total_bytes + SMALLEST
    assert plan_for(MIXED, str(SMALLEST), demand=DEMAND, available_bytes=total).total_bytes == total
    with pytest.raises(DoesNotFit):
        plan_for(MIXED, str(SMALLEST), demand=DEMAND, available_bytes=total - 1)


def test_the_refusal_shows_every_addend_the_available_bytes_with_their_reason_and_what_would_fit() -> None:
    room = DEMAND.total_bytes + SMALLEST + 5
    with pytest.raises(DoesNotFit) as refusal:
        plan_for(MIXED, "all", demand=DEMAND, available_bytes=room)
    total = DEMAND.total_bytes + 24 * SMALL_SLOT + 8 * LARGE_SLOT
    lines = str(refusal.value).splitlines()
    assert [line.split("(")[-1] for line in lines[1:7]] == [
        "1000001 bytes)",
        "200002 bytes)",
        "30003 bytes)",
        f"{24 * SMALL_SLOT} bytes)",
        f"{8 * LARGE_SLOT} bytes)",
        f"{total} bytes)",
    ]
    assert [line.split(":")[0].strip() for line in lines[1:7]] == [
        "resident weights",
        "KV cache of 512 tokens",
        "workspace",
        "24 slots for layers 0-2",
        "8 slots for layer 3",
        "total",
    ]
    assert f"({room} bytes): the test says {room} bytes" in lines[7]
    assert lines[8] == (
        f"expert memory of {SMALLEST // 1024}KiB or less would fit into the {SMALLEST + 5} bytes that are left"
    )
    for fitting in (f"{SMALLEST // 1024}KiB", str(SMALLEST + 5)):
        assert plan_for(MIXED, fitting, demand=DEMAND, available_bytes=room).expert_memory_bytes <= SMALLEST + 5


@pytest.mark.parametrize("request_text", [None, "all"])
@pytest.mark.parametrize(
    ("lacking", "advice"),
    [(200_002, "a shorter context saves that much"), (200_003, "not even a shorter context saves that much")],
)
def test_where_even_the_smallest_does_not_fit_the_refusal_says_how_much_is_lacking(
    request_text: str | None, lacking: int, advice: str
) -> None:
    room = DEMAND.total_bytes + SMALLEST - lacking
    with pytest.raises(DoesNotFit) as refusal:
        plan_for(MIXED, request_text, demand=DEMAND, available_bytes=room)
    assert str(refusal.value).endswith(
        f"even with the smallest expert memory, {SMALLEST} bytes, {lacking} bytes are lacking; {advice}"
    )


def test_by_default_every_expert_has_a_slot_within_nine_tenths_of_the_available_memory() -> None:
    demand = evolve(DEMAND, workspace_bytes=30_009)
    everything = demand.total_bytes + 24 * SMALL_SLOT + 8 * LARGE_SLOT
    enough, no_rest = divmod(everything * 10, 9)
    assert no_rest == 0
    plan = plan_for(MIXED, None, demand=demand, available_bytes=enough)
    assert slot_counts(plan) == [24, 8]
    assert "every expert has a slot" in plan.notes[0]
    assert slot_counts(plan_for(MIXED, None, demand=demand, available_bytes=enough - 1)) != [24, 8]


def test_by_default_slots_take_three_quarters_of_what_is_left_otherwise() -> None:
    left = 1_500_001
    plan = plan_for(MIXED, None, demand=DEMAND, available_bytes=DEMAND.total_bytes + left)
    assert plan.expert_memory_bytes <= left * 3 // 4 < plan.expert_memory_bytes + SMALL_SLOT
    assert f"75 % of the {left} bytes left beside everything else: at most {left * 3 // 4} bytes" in plan.notes[0]
    assert plan.asked is None


@pytest.mark.parametrize("experts_per_token", [8, 10])
def test_a_default_never_goes_below_what_one_step_needs(experts_per_token: int) -> None:
    checkpoint = checkpoint_of([(4096, 4096, 64)] * 4, experts_per_token)
    smallest = experts_per_token * 8192
    plan = plan_for(checkpoint, None, demand=DEMAND, available_bytes=DEMAND.total_bytes + smallest)
    assert slot_counts(plan) == [experts_per_token]
    assert f"they take the smallest that does: {smallest} bytes" in plan.notes[0]


def test_the_backend_is_asked_for_whole_slots_beside_everything_that_is_sure_to_be_there() -> None:
    backend = Backend()
    plan_for(MIXED, "all", demand=DEMAND, backend=backend)
    assert backend.calls == [
        (SMALL_SLOT, DEMAND.total_bytes + 2 * LARGE_SLOT, 24),
        (LARGE_SLOT, DEMAND.total_bytes + 24 * SMALL_SLOT, 8),
    ]


def test_a_request_that_the_backend_cuts_is_refused_with_its_reason_and_the_sum() -> None:
    backend = Backend(grant=lambda expert_bytes, _resident, asked: asked - (expert_bytes == LARGE_SLOT))
    with pytest.raises(DoesNotFit) as refusal:
        plan_for(MIXED, "all", demand=DEMAND, backend=backend)
    text = str(refusal.value)
    assert text.startswith(
        f"backend 'test' grants 7 of 8 slots of {LARGE_SLOT} bytes for layer 3, and expert memory of all asks for 8;"
        " with none asked for, as many as fit are taken: the test's backend says so\n"
    )
    for byte_count in (1_000_001, 200_002, 30_003, 24 * SMALL_SLOT, 8 * LARGE_SLOT):
        assert f"({byte_count} bytes)" in text


def test_a_default_takes_what_the_backend_grants_and_says_so() -> None:
    backend = Backend(grant=lambda _expert, _resident, asked: asked - 1)
    plan = plan_for(MIXED, None, backend=backend)
    assert slot_counts(plan) == [23, 7]
    assert "backend 'test' grants 23 of 24 slots for layers 0-2: the test's backend says so" in plan.notes


@pytest.mark.parametrize(("granted", "accepted"), [(2, True), (1, False), (0, False)])
def test_a_default_is_refused_where_the_backend_grants_less_than_one_step_needs(granted: int, accepted: bool) -> None:
    backend = Backend(grant=lambda *_: granted)
    if accepted:
        assert slot_counts(plan_for(MIXED, None, backend=backend)) == [2, 2]
    else:
        with pytest.raises(DoesNotFit, match=rf"grants {granted} of 24 slots .* and one step needs 2"):
            plan_for(MIXED, None, backend=backend)


@pytest.mark.parametrize("request_text", [None, "all", str(SMALLEST)])
def test_a_backend_that_grants_more_than_asked_breaks_the_contract(request_text: str | None) -> None:
    with pytest.raises(BackendContractError, match=r"granted .* and .* were asked for"):
        plan_for(MIXED, request_text, backend=Backend(grant=lambda _expert, _resident, asked: asked + 1))


def of_bytes(memory_bytes: int) -> Callable[[int, int, int], int]:
    """Grants what fits into that many bytes."""
    return lambda expert, resident, asked: min(asked, max(0, memory_bytes - resident) // expert)


EVEN = checkpoint_of([(33792, 21504, 64)] * 4 + [(73728, 36864, 64)] * 4)
"""Two classes of 256 experts each."""


@pytest.mark.parametrize("one_pool", [True, False])
def test_a_default_that_the_backend_cuts_is_shared_out_as_a_request_of_those_bytes(one_pool: bool) -> None:
    """Asked one by one, the first class would take all 256 slots and leave the second 24."""
    backend = Backend(one_pool=one_pool, grant=of_bytes(300 * SMALL_SLOT))
    plan = plan_for(EVEN, None, backend=backend)
    assert slot_counts(plan) == [108, 106]
    assert slot_counts(plan) == slot_counts(plan_for(EVEN, str(plan.expert_memory_bytes)))
    assert [asked for *_, asked in backend.calls] == [256, 256, 108, 106]
    assert [resident for _, resident, _ in backend.calls[2:]] == [2 * LARGE_SLOT, 108 * SMALL_SLOT]
    (note,) = (note for note in plan.notes if "backend 'test' grants" in note)
    assert f"grants {plan.expert_memory_bytes} of {256 * (SMALL_SLOT + LARGE_SLOT)} bytes" in note
    assert "108 of 256 slots for layers 0-3, 106 of 256 slots for layers 4-7; " in note
    assert note.endswith("the test's backend says so")


def test_a_limit_of_each_class_is_no_limit_of_all_of_them() -> None:
    """Shares of 18 and 6 would leave memory idle: of the large slots it grants 3, however few the small ones are."""
    backend = Backend(grant=lambda expert, _resident, asked: asked if expert == SMALL_SLOT else min(asked, 3))
    plan = plan_for(MIXED, None, backend=backend)
    assert [asked for *_, asked in backend.calls] == [24, 8, 18, 6]
    assert slot_counts(plan) == [24, 3]
    assert [note for note in plan.notes if "grants" in note] == [
        "backend 'test' grants 3 of 8 slots for layer 3: the test's backend says so"
    ]


def shrinking(first_bytes: int, then_bytes: int) -> Callable[[int, int, int], int]:
    """Grants what fits into the first number of bytes for each of two classes, and into the other from then on."""
    left = [first_bytes, first_bytes]
    return lambda *asked: of_bytes(left.pop() if left else then_bytes)(*asked)


def test_memory_that_goes_between_two_answers_makes_shares_smaller_and_no_less_even() -> None:
    room = 250 * SMALL_SLOT
    plan = plan_for(EVEN, None, backend=Backend(grant=shrinking(300 * SMALL_SLOT, room)))
    assert slot_counts(plan) == [108, 78]
    assert plan.expert_memory_bytes <= room
    (note,) = (note for note in plan.notes if "backend 'test' grants" in note)
    assert "108 of 256 slots for layers 0-3, 78 of 256 slots for layers 4-7; " in note


def test_shares_that_are_cut_below_what_a_step_needs_leave_what_was_granted_before() -> None:
    plan = plan_for(EVEN, None, backend=Backend(grant=shrinking(300 * SMALL_SLOT, 3 * SMALL_SLOT)))
    assert slot_counts(plan) == [256, 24]
    assert sum("backend 'test' grants" in note for note in plan.notes) == 1


def test_a_second_answer_that_grants_more_than_asked_breaks_the_contract_too() -> None:
    answers = [24, 2, 25]
    with pytest.raises(BackendContractError, match=r"granted 25 slots of 61440 bytes, and 18 were asked for"):
        plan_for(MIXED, None, backend=Backend(grant=lambda *_: answers.pop(0)))


TIERED = evolve(DEMAND, on_device=True)
"""What a device with memory of its own computes with."""


def test_one_memory_is_counted_once_and_two_memories_apart() -> None:
    """24 needed of 20 on one pool; with a device of its own, 12 and 12 lie in different memories."""
    unit = 1 << 20
    checkpoint = checkpoint_of([(unit // 2, unit // 2, 12)])
    demand = evolve(NOTHING, resident_bytes=12 * unit)
    with pytest.raises(DoesNotFit, match=rf"total: .*\({24 * unit} bytes\)"):
        plan_for(checkpoint, "all", demand=demand, available_bytes=20 * unit)
    backend = Backend(
        one_pool=False, grant=lambda expert_bytes, _resident, asked: min(asked, 20 * unit // expert_bytes)
    )
    plan = plan_for(checkpoint, "all", demand=demand, backend=backend, available_bytes=20 * unit)
    assert (slot_counts(plan), plan.one_pool) == ([12], False)


def test_with_two_memories_the_host_must_hold_everything_but_the_slots() -> None:
    backend = Backend(one_pool=False)
    plan_for(MIXED, "all", demand=DEMAND, backend=backend, available_bytes=DEMAND.total_bytes)
    with pytest.raises(DoesNotFit, match=r"\n1 bytes are lacking; a shorter context saves that much") as refusal:
        plan_for(MIXED, "all", demand=DEMAND, backend=backend, available_bytes=DEMAND.total_bytes - 1)
    assert "slots" not in str(refusal.value)


def test_with_two_memories_the_default_leaves_the_later_classes_what_a_step_needs() -> None:
    """The device holds the rest and ten small slots' bytes; the first class must not take all of it."""
    device_bytes = DEMAND.total_bytes + 10 * SMALL_SLOT
    backend = Backend(
        one_pool=False, grant=lambda expert, resident, asked: max(0, min(asked, (device_bytes - resident) // expert))
    )
    plan = plan_for(MIXED, None, demand=TIERED, backend=backend)
    assert slot_counts(plan) == [6, 2]
    assert plan.total_bytes <= device_bytes


def test_a_device_that_does_not_compute_is_asked_for_its_slots_alone() -> None:
    """It holds just the slots; weights and caches, which are more, lie in the host's memory."""
    device_bytes = 24 * SMALL_SLOT + 8 * LARGE_SLOT
    demand = evolve(DEMAND, resident_bytes=10 * device_bytes)
    backend = Backend(
        one_pool=False, grant=lambda expert, resident, asked: max(0, min(asked, (device_bytes - resident) // expert))
    )
    plan = plan_for(MIXED, "all", demand=demand, backend=backend)
    assert plan.device_bytes == device_bytes
    assert backend.calls == [(SMALL_SLOT, 2 * LARGE_SLOT, 24), (LARGE_SLOT, 24 * SMALL_SLOT, 8)]
    assert backend.other_slots_bytes == [2 * LARGE_SLOT, 24 * SMALL_SLOT]
    with pytest.raises(DoesNotFit) as refusal:
        plan_for(MIXED, "all", demand=demand, backend=Backend(one_pool=False, grant=lambda *_: 0))
    assert "resident weights" not in str(refusal.value)


def test_on_a_device_of_its_own_the_host_holds_the_weights_while_they_load_and_the_host_slots() -> None:
    tier_bytes = 24 * SMALL_SLOT + 8 * LARGE_SLOT
    backend = Backend(one_pool=False, has_host_tier=True)
    enough = DEMAND.resident_bytes + tier_bytes
    plan = plan_for(MIXED, str(SMALLEST), demand=TIERED, backend=backend, available_bytes=enough, host="all")
    assert [planned.host_slot_count for planned in plan.classes] == [24, 8]
    assert (plan.host_bytes, plan.device_bytes) == (enough, DEMAND.total_bytes + SMALLEST)
    with pytest.raises(DoesNotFit) as refusal:
        plan_for(MIXED, str(SMALLEST), demand=TIERED, backend=backend, available_bytes=enough - 1, host="all")
    lines = str(refusal.value).splitlines()
    assert lines[0] == "host memory of all does not fit into the host's memory:"
    assert [line.split(":")[0].strip() for line in lines[1:5]] == [
        "resident weights while they load",
        "24 host slots for layers 0-2",
        "8 host slots for layer 3",
        "total",
    ]
    assert lines[-1].endswith(f" would fit, in the {tier_bytes - 1} bytes that are left")


STAGING_BYTES = 8 * (SMALL_SLOT + LARGE_SLOT)


@pytest.mark.parametrize("on_device", [True, False])
def test_staging_buffers_come_out_of_the_hosts_memory(on_device: bool) -> None:
    demand = evolve(DEMAND, on_device=on_device)
    of_demand = DEMAND.resident_bytes if on_device else DEMAND.total_bytes
    backend = Backend(one_pool=False, staging_count=8)
    enough = of_demand + STAGING_BYTES
    plan = plan_for(MIXED, "all", demand=demand, backend=backend, available_bytes=enough)
    assert (plan.staging_bytes, plan.host_bytes) == (STAGING_BYTES, enough)
    assert plan.device_bytes == plan.expert_memory_bytes + (DEMAND.total_bytes if on_device else 0)
    assert plan.total_bytes == DEMAND.total_bytes + plan.expert_memory_bytes + STAGING_BYTES
    assert [text for what, text in plan.as_table() if what == "staging buffers"] == [
        f"1.31 MiB ({STAGING_BYTES} bytes)"
    ]
    told = plan.to_json()
    assert told["staging_bytes"] == STAGING_BYTES
    assert [planned["staging_bytes"] for planned in told["classes"]] == [8 * SMALL_SLOT, 8 * LARGE_SLOT]  # type: ignore[attr-defined]  # JSON
    with pytest.raises(DoesNotFit) as refusal:
        plan_for(MIXED, "all", demand=demand, backend=backend, available_bytes=enough - 1)
    lines = str(refusal.value).splitlines()
    assert f"  staging buffers: 1.31 MiB ({STAGING_BYTES} bytes)" in lines
    assert lines[-1].startswith("1 bytes are lacking; ")
    assert lines[-1].endswith("; fewer staging buffers save some, if the backend has an option for it")


def test_a_host_tier_gets_what_staging_leaves() -> None:
    backend = Backend(one_pool=False, has_host_tier=True, staging_count=8)
    left = 1_500_001
    plan_of = partial(
        plan_for,
        *(MIXED, str(SMALLEST)),
        demand=TIERED,
        backend=backend,
        available_bytes=DEMAND.resident_bytes + STAGING_BYTES + left,
    )
    plan = plan_of()
    assert plan.host_memory_bytes <= left // 2 < plan.host_memory_bytes + SMALL_SLOT
    assert plan.host_bytes == DEMAND.resident_bytes + STAGING_BYTES + plan.host_memory_bytes
    assert any(f"50 % of the {left} bytes that the host has left" in note for note in plan.notes)
    with pytest.raises(DoesNotFit, match=rf"staging buffers: .*\({STAGING_BYTES} bytes\)") as refusal:
        plan_of(host=str(left + LARGE_SLOT))
    assert str(refusal.value).endswith(f"in the {left} bytes that are left")


def test_a_plan_tells_of_the_staging_that_goes_with_the_slots_it_has() -> None:
    """Each class of the last answer, where the backend was asked twice."""
    backend = Backend(one_pool=False, staging_count=8, grant=of_bytes(300 * SMALL_SLOT))
    plan = plan_for(EVEN, None, backend=backend)
    assert [planned.staging_bytes for planned in plan.classes] == [8 * SMALL_SLOT, 8 * LARGE_SLOT]


def test_by_default_a_host_tier_takes_half_of_what_the_host_has_left() -> None:
    backend = Backend(one_pool=False, has_host_tier=True)
    left = 1_500_001
    plan = plan_for(MIXED, str(SMALLEST), demand=TIERED, backend=backend, available_bytes=DEMAND.resident_bytes + left)
    assert plan.host_memory_bytes <= left // 2 < plan.host_memory_bytes + SMALL_SLOT
    assert any(f"50 % of the {left} bytes that the host has left" in note for note in plan.notes)


@pytest.mark.parametrize("kind", ["inclusive", "exclusive"])
def test_a_host_tier_has_no_more_slots_than_there_are_experts(kind: HostTiering) -> None:
    backend = Backend(one_pool=False, has_host_tier=True)
    plan = plan_for(checkpoint_of([(4096, 4096, 100)]), str(60 * 8192), backend=backend, host_tiering=kind)
    assert plan.classes[0].host_slot_count == 100


@pytest.mark.parametrize(
    ("request_text", "host", "available_bytes", "reason"),
    [
        ("all", None, 1 << 60, "every expert has a slot of its own"),
        ("all", "1GiB", 1 << 60, "every expert has a slot of its own"),
        (str(SMALLEST), "0", 1 << 60, "host memory of 0 was asked for"),
        (str(SMALLEST), None, DEMAND.resident_bytes + 1, "the host has 1 bytes left"),
    ],
)
def test_a_host_tier_that_is_off_says_why(
    request_text: str, host: str | None, available_bytes: int, reason: str
) -> None:
    backend = Backend(one_pool=False, has_host_tier=True)
    plan = plan_for(MIXED, request_text, demand=TIERED, backend=backend, available_bytes=available_bytes, host=host)
    assert plan.host_memory_bytes == 0
    assert reason in str(plan.host_tier_off)
    assert f"there is no host tier: {plan.host_tier_off}" in plan.notes


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (Backend(), "its slots are host memory already"),
        (Backend(one_pool=False), r"does not offer host slots \(the hook alloc_host_slots\)"),
    ],
)
def test_a_host_tier_that_the_backend_does_not_have_is_refused_by_name(backend: Backend, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"host memory of 4GiB was asked for, but backend 'test' has no .*{reason}"):
        plan_for(MIXED, "all", backend=backend, host="4GiB")
    with pytest.raises(ConfigError, match=rf"a host tier that is exclusive was asked for, .*{reason}"):
        plan_for(MIXED, "all", backend=backend, host_tiering="exclusive")
    assert plan_for(MIXED, "all", backend=backend, host="0").host_memory_bytes == 0


def test_layers_that_get_no_host_slots_while_others_do_are_named_with_what_would_do() -> None:
    backend = Backend(one_pool=False, has_host_tier=True)
    plan_of = partial(plan_for, MIXED, str(SMALLEST), demand=TIERED, backend=backend)
    plan = plan_of(host=str(2 * SMALL_SLOT + 1))
    assert [planned.host_slot_count for planned in plan.classes] == [2, 0]
    (note,) = [note for note in plan.notes if "no host slots" in note]
    assert note.startswith(
        "there are no host slots for layer 3, so that what is missed there is always read from the file: one takes"
        f" {LARGE_SLOT} bytes, and those of other layers leave 1; host memory of "
    )
    (enough,) = re.findall(r"; host memory of (\S+) pays for one$", note)
    sufficient = plan_of(host=enough)
    assert all(planned.host_slot_count for planned in sufficient.classes)
    assert not [note for note in sufficient.notes if "no host slots" in note]
    cramped = plan_of(host=str(2 * SMALL_SLOT), available_bytes=DEMAND.resident_bytes + 2 * SMALL_SLOT)
    assert any(note.endswith("those of other layers leave 0") for note in cramped.notes)  # the host has no more


def test_layers_whose_experts_all_have_slots_are_named_where_others_get_host_slots() -> None:
    backend = Backend(one_pool=False, has_host_tier=True)
    plan = plan_for(MIXED, str(24 * SMALL_SLOT + 7 * LARGE_SLOT), demand=TIERED, backend=backend, host="all")
    assert [planned.host_slot_count for planned in plan.classes] == [0, 8]
    assert "there are no host slots for layers 0-2: every expert there has a slot of its own" in plan.notes


def test_host_memory_of_less_than_a_slot_is_refused_with_the_bytes_of_one() -> None:
    backend = Backend(one_pool=False, has_host_tier=True)
    with pytest.raises(BudgetTooSmall, match=rf"host memory of 1KiB is 1024 bytes, and a host slot has {SMALL_SLOT}"):
        plan_for(MIXED, str(SMALLEST), backend=backend, host="1KiB")


def test_a_class_whose_experts_all_have_slots_gets_no_host_slots() -> None:
    backend = Backend(
        one_pool=False,
        has_host_tier=True,
        grant=lambda expert, _resident, asked: asked if expert == SMALL_SLOT else min(asked, 3),
    )
    plan = plan_for(MIXED, None, backend=backend)
    assert [(planned.slot_count, planned.host_slot_count) for planned in plan.classes] == [(24, 0), (3, 8)]


@pytest.mark.parametrize("host", ["0", "0%"])
@pytest.mark.parametrize("has_host_tier", [True, False])
def test_host_memory_of_0_turns_off_a_tier_of_any_kind_and_says_so(host: str, has_host_tier: bool) -> None:
    """A file may name the kind, and the command line turn it off."""
    backend = Backend(one_pool=False, has_host_tier=has_host_tier)
    plan = plan_for(MIXED, str(SMALLEST), backend=backend, host=host, host_tiering="exclusive")
    assert plan.host_memory_bytes == 0
    assert [note for note in plan.notes if "there is no host tier" in note and "host memory of 0" in note]


def test_an_inclusive_tier_smaller_than_the_slots_is_noted() -> None:
    backend = Backend(one_pool=False, has_host_tier=True)
    smaller = plan_for(MIXED, "50%", backend=backend, host="40%", host_tiering="inclusive")
    assert any("keeps little that the slots do not have themselves" in note for note in smaller.notes)
    exclusive = plan_for(MIXED, "50%", backend=backend, host="40%", host_tiering="exclusive")
    assert not any("keeps little" in note for note in exclusive.notes)


def published_case(request: str, backend: Backend) -> Plan:
    """A public report: 369.96 GiB in files, 335.62 of it experts; 26.01 GiB are resident; 8,000 slots are 44.56 GiB."""
    slot_bytes = rounded_up(round(44.56 * GIB / 8000)) - 4096
    expert_count = round(335.62 * GIB / slot_bytes)
    checkpoint = checkpoint_of([(slot_bytes - 4096, 4096, expert_count)], experts_per_token=8)
    demand = evolve(NOTHING, resident_bytes=-(-2601 * GIB // 100), on_device=True)
    request = str(8000 * slot_bytes) if request == "8000 slots" else request
    return plan_for(checkpoint, request, demand=demand, backend=backend, available_bytes=round(119.631 * GIB))


def test_the_published_case_streams_on_one_pool_and_is_refused_without_streaming() -> None:
    plan = published_case("8000 slots", Backend())
    assert slot_counts(plan) == [8000]
    assert plan.total_bytes == plan.demand.resident_bytes + 8000 * plan.classes[0].slot_bytes
    assert round(plan.total_bytes / GIB, 2) == 70.57
    with pytest.raises(DoesNotFit, match=r"resident weights: 26\.01 GiB(.|\n)*total: 361\.6"):
        published_case("all", Backend())


def test_the_published_case_is_refused_by_name_where_the_device_has_no_room_for_slots() -> None:
    """On a device of that size with memory of its own; and on one that has no store at all."""
    device_bytes = round(119.631 * GIB)
    own = Backend(
        one_pool=False, grant=lambda slot, resident, asked: max(0, min(asked, (device_bytes - resident) // slot))
    )
    assert slot_counts(published_case("8000 slots", own)) == [8000]
    with pytest.raises(
        DoesNotFit, match=r"backend 'test' grants \d+ of \d+ slots .*(.|\n)*resident weights: 26\.01 GiB"
    ):
        published_case("all", own)
    none = Backend(one_pool=False, grant=lambda *_: 0)
    with pytest.raises(DoesNotFit, match=r"backend 'test' grants 0 of 8000 slots of \d+ bytes for layer 0"):
        published_case("8000 slots", none)


def test_a_budget_below_one_tokens_experts_is_noted_and_not_refused() -> None:
    """Top-2 in three layers and in one: 6 and 2 slots hold one token."""
    thin = plan_for(MIXED, str(5 * SMALL_SLOT + 2 * LARGE_SLOT))
    assert slot_counts(thin) == [5, 2]
    assert len(thin.notes) == 1
    assert thin.notes[0].startswith("5 slots for layers 0-2 are fewer than the 6 experts that one token uses there")
    (enough,) = re.findall(r"expert memory of (\w+) would hold what one token uses", thin.notes[0])
    assert plan_for(MIXED, enough).notes == ()
    assert plan_for(MIXED, str(6 * SMALL_SLOT + 2 * LARGE_SLOT)).notes == ()
    assert plan_for(checkpoint_of([(4096, 4096, 2)] * 3), "all").notes == ()


def test_what_the_backend_cuts_is_not_said_to_be_everything_nor_to_be_asked_for_more() -> None:
    cut = Backend(grant=lambda slot, resident, asked: min(asked, 3))
    notes = plan_for(MIXED, None, backend=cut, available_bytes=GIB).notes
    assert any("backend 'test' grants" in note for note in notes)
    assert not any("by default" in note for note in notes)
    assert any("loads most or all of them again" in note for note in notes)
    assert not any("would hold what one token uses" in note for note in notes)


def test_layers_are_named_in_runs() -> None:
    small, large = (4096, 4096, 4), (8192, 4096, 4)
    table = plan_for(checkpoint_of([small, small, large, small, large, small, small]), "all").as_table()
    assert [what for what, _ in table if "slots" in what] == [
        "20 slots for layers 0-1, 3, 5-6",
        "8 slots for layers 2, 4",
    ]


def test_the_table_shows_the_sum_the_available_memory_and_the_smallest_budget() -> None:
    plan = plan_for(MIXED, "all", demand=DEMAND, available_bytes=GIB)
    assert [what for what, _ in plan.as_table()] == [
        "resident weights",
        "KV cache of 512 tokens",
        "workspace",
        "24 slots for layers 0-2",
        "8 slots for layer 3",
        "total",
        "available",
        "all routed experts in the files",
        "smallest expert memory",
    ]
    rows = dict(plan.as_table())
    assert f"({plan.total_bytes} bytes)" in rows["total"]
    expert_bytes = plan.classes[1].size_class.expert_bytes
    assert rows["8 slots for layer 3"].endswith(
        f"each 108.00 KiB ({LARGE_SLOT} bytes), in whole pages, for an expert of {expert_bytes} bytes"
    )
    assert rows["available"] == f"1.00 GiB ({GIB} bytes), as the whole host has"
    assert "(2211840 bytes)" in rows["all routed experts in the files"]


def test_the_json_form_holds_the_same_numbers() -> None:
    limited = AvailableMemory(GIB, "why", 2 * GIB, limit_bytes=GIB + 1, limit_path=Path("groups/memory.max"))
    plan = make_plan(MIXED, DEMAND, MemoryRequest.parse("50%"), Backend(), limited)
    told = json.loads(json.dumps(plan.to_json()))
    assert told == {
        "asked": "50%",
        "asked_host": None,
        "demand": {
            "resident_bytes": 1_000_001,
            "kv_cache_bytes": 200_002,
            "workspace_bytes": 30_003,
            "context_tokens": 512,
            "on_device": False,
        },
        "classes": [
            {
                "layers": [0, 1, 2],
                "expert_bytes": 55296,
                "expert_count": 24,
                "slot_bytes": SMALL_SLOT,
                "slot_count": plan.classes[0].slot_count,
                "total_bytes": plan.classes[0].slot_count * SMALL_SLOT,
                "host_slot_count": 0,
                "host_memory_bytes": 0,
                "staging_bytes": 0,
            },
            {
                "layers": [3],
                "expert_bytes": 110592,
                "expert_count": 8,
                "slot_bytes": LARGE_SLOT,
                "slot_count": plan.classes[1].slot_count,
                "total_bytes": plan.classes[1].slot_count * LARGE_SLOT,
                "host_slot_count": 0,
                "host_memory_bytes": 0,
                "staging_bytes": 0,
            },
        ],
        "expert_memory_bytes": plan.classes[0].slot_count * SMALL_SLOT + plan.classes[1].slot_count * LARGE_SLOT,
        "host_memory_bytes": 0,
        "staging_bytes": 0,
        "host_tiering": None,
        "host_tier_off": None,
        "device_bytes": 0,
        "host_bytes": plan.total_bytes,
        "smallest_bytes": SMALLEST,
        "routed_bytes": 2_211_840,
        "total_bytes": plan.total_bytes,
        "one_pool": True,
        "available": {
            "bytes": GIB,
            "reason": "why",
            "host_available_bytes": 2 * GIB,
            "limit_bytes": GIB + 1,
            "limit_path": "groups/memory.max",
        },
        "notes": list(plan.notes),
    }
    assert plan_for(MIXED, None).to_json()["asked"] is None


@pytest.mark.parametrize("name", ["resident_bytes", "kv_cache_bytes", "workspace_bytes", "context_tokens"])
def test_a_demand_is_never_negative(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        evolve(NOTHING, **{name: -1})


layer_shapes = st.tuples(st.integers(1, 5).map(lambda n: n * 4096 - 96), st.just(4096), st.integers(1, 12))
checkpoints = st.lists(layer_shapes, min_size=1, max_size=8).flatmap(
    lambda shapes: st.builds(
        checkpoint_of, st.just(shapes), st.integers(1, min(expert_count for *_, expert_count in shapes))
    )
)


def smallest_of(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.experts_per_token * group.layout.slot_bytes for group in size_classes(checkpoint))


@given(checkpoints, st.integers(0, 2_000_000))
def test_a_budget_is_never_exceeded_never_short_of_a_step_and_spent_to_the_last_slot(
    checkpoint: Checkpoint, extra_bytes: int
) -> None:
    budget = smallest_of(checkpoint) + extra_bytes
    plan = plan_for(checkpoint, str(budget))
    assert plan.expert_memory_bytes <= budget
    for planned in plan.classes:
        assert checkpoint.experts_per_token <= planned.slot_count <= planned.size_class.expert_count
        full = planned.slot_count == planned.size_class.expert_count
        assert full or planned.slot_bytes > budget - plan.expert_memory_bytes
    assert plan == plan_for(checkpoint, str(budget))


@given(checkpoints, st.integers(0, 2_000_000))
def test_no_class_runs_ahead_of_one_whose_slots_cost_no_more(checkpoint: Checkpoint, extra_bytes: int) -> None:
    plan = plan_for(checkpoint, str(smallest_of(checkpoint) + extra_bytes))
    for ahead in plan.classes:
        if ahead.slot_count <= checkpoint.experts_per_token:
            continue
        for behind in plan.classes:
            if behind.slot_bytes <= ahead.slot_bytes and behind.slot_count < behind.size_class.expert_count:
                assert Fraction(ahead.slot_count, ahead.size_class.expert_count) <= Fraction(
                    behind.slot_count + 1, behind.size_class.expert_count
                )


@given(checkpoints, st.integers(0, 1_000_000), st.integers(0, 1_000_000))
def test_a_larger_budget_never_holds_fewer_bytes(checkpoint: Checkpoint, extra_bytes: int, more_bytes: int) -> None:
    budget = smallest_of(checkpoint) + extra_bytes
    smaller, larger = (plan_for(checkpoint, str(asked)) for asked in (budget, budget + more_bytes))
    assert smaller.expert_memory_bytes <= larger.expert_memory_bytes


@given(checkpoints, st.integers(0, 3_000_000))
def test_a_default_fits_the_pool_or_is_refused_and_never_breaks_its_own_minimum(
    checkpoint: Checkpoint, available_bytes: int
) -> None:
    fits = DEMAND.total_bytes + smallest_of(checkpoint) <= available_bytes
    if not fits:
        with pytest.raises(DoesNotFit):
            plan_for(checkpoint, None, demand=DEMAND, available_bytes=available_bytes)
        return
    plan = plan_for(checkpoint, None, demand=DEMAND, available_bytes=available_bytes)
    assert plan.smallest_bytes <= plan.expert_memory_bytes
    assert plan.total_bytes <= available_bytes
    assert plan.notes


@given(checkpoints, st.integers(0, 10**7), st.integers(0, 10**7))
def test_what_a_refusal_says_would_fit_does_fit(checkpoint: Checkpoint, asked_bytes: int, available_bytes: int) -> None:
    smallest = smallest_of(checkpoint)
    try:
        plan_for(checkpoint, str(asked_bytes), demand=DEMAND, available_bytes=available_bytes)
    except BudgetTooSmall:
        assert asked_bytes < smallest
    except DoesNotFit as refusal:
        advice = str(refusal).splitlines()[-1]
        if "would fit" in advice:
            fitting = advice.split()[3]
            plan_for(checkpoint, fitting, demand=DEMAND, available_bytes=available_bytes)
            if MemoryRequest.parse(fitting).size_bytes != smallest:  # a run that finds a little less available
                left_bytes = int(advice.split()[-5])
                plan_for(checkpoint, fitting, demand=DEMAND, available_bytes=available_bytes - left_bytes // 32)
        else:
            assert DEMAND.total_bytes + smallest > available_bytes
    else:
        assert smallest <= asked_bytes


def fractions(plan: Plan) -> list[Fraction]:
    """Of its experts, what each class has slots for, the smallest first."""
    return sorted(Fraction(planned.slot_count, planned.size_class.expert_count) for planned in plan.classes)


@given(checkpoints, st.integers(0, 2_000_000), st.booleans())
def test_what_the_backend_has_room_for_is_never_exceeded_and_as_even_as_a_request_of_those_bytes(
    checkpoint: Checkpoint, extra_bytes: int, one_pool: bool
) -> None:
    room = smallest_of(checkpoint) + extra_bytes
    backend = Backend(one_pool=one_pool, grant=of_bytes(room))
    plan = plan_for(checkpoint, None, backend=backend)
    assert plan.expert_memory_bytes <= room
    assert all(planned.slot_count >= checkpoint.experts_per_token for planned in plan.classes)
    assert fractions(plan) >= fractions(plan_for(checkpoint, str(plan.expert_memory_bytes)))
    assert len(backend.calls) in (len(plan.classes), 2 * len(plan.classes))
    growing = [planned for planned in plan.classes if planned.slot_count < planned.size_class.expert_count]
    if growing:
        assert room - plan.expert_memory_bytes < 2 * max(planned.slot_bytes for planned in plan.classes)
    assert sum("backend 'test' grants" in note for note in plan.notes) <= len(growing)
