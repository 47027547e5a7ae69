"""How many slots each size class gets, and whether everything fits: one answer for showing a plan and for loading.

Pure and exact: integers in, integers out, no file, clock or device. It asks the backend and reads no memory itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm
from typing import Protocol

from attrs import evolve, field, frozen, validators

from expertstream.checkpoint.index import Checkpoint
from expertstream.config import HostTiering
from expertstream.errors import BackendContractError, BudgetTooSmall, ConfigError, DoesNotFit
from expertstream.machine import AvailableMemory
from expertstream.size_classes import SizeClass, name_layers, size_classes
from expertstream.slots import IO_ALIGNMENT_BYTES, SlotBudget
from expertstream.units import MemoryRequest, format_bytes, round_down_bytes, round_up_bytes

EVERYTHING_FITS_PERCENT = 90
"""By default every expert gets a slot where all of it stays within this part of the available memory."""

DEFAULT_PERCENT = 75
"""Otherwise slots take this part of what is left. As big as fits is slower: the page cache and the rest of the
system need room, and where memory runs out speed collapses instead of falling."""

DEFAULT_HOST_PERCENT = 50
"""A host tier takes this part of what the host has left: it is pinned, so the system cannot take it back."""

DEFAULT_HOST_TIERING: HostTiering = "exclusive"


class PlanningBackend(Protocol):
    """What the planner asks a backend; see `expertstream.hookspecs` for what the answers mean."""

    @property
    def name(self) -> str:
        """What it is called in the configuration."""
        ...

    @property
    def has_host_tier(self) -> bool:
        """Whether host slots can be had below its slots."""
        ...

    def host_memory_is_device_addressable(self) -> bool:
        """True where slots come out of the same memory as everything else."""
        ...

    def budget_for_expert_size(
        self, expert_bytes: int, resident_bytes: int, asked: int | None, other_slots_bytes: int
    ) -> SlotBudget:
        """How many slots of `expert_bytes` fit beside `resident_bytes`, at most `asked`, and what staging takes."""
        ...


@frozen(kw_only=True)
class Demand:
    """What a run needs besides slots, in bytes. The engine computes it; `context_tokens` is what the KV cache holds.

    `on_device` says that all of it lies in the memory that slots lie in, also where that is not the host's.
    """

    resident_bytes: int = field(validator=validators.ge(0))
    kv_cache_bytes: int = field(validator=validators.ge(0))
    workspace_bytes: int = field(validator=validators.ge(0))
    context_tokens: int = field(validator=validators.ge(0))
    on_device: bool = False

    @property
    def total_bytes(self) -> int:
        """The sum of the three."""
        return self.resident_bytes + self.kv_cache_bytes + self.workspace_bytes


@frozen
class ClassPlan:
    """The slots of one size class, the host slots below them, and the bytes of the staging buffers beside them."""

    size_class: SizeClass
    slot_count: int
    host_slot_count: int = 0
    staging_bytes: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, padding included."""
        return self.size_class.layout.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots of this class."""
        return self.slot_count * self.slot_bytes

    @property
    def host_memory_bytes(self) -> int:
        """Bytes of all host slots of this class."""
        return self.host_slot_count * self.slot_bytes


@frozen(kw_only=True)
class Plan:
    """What will be allocated, next to what was asked for and what there is.

    `smallest_bytes` is the least expert memory that a step can run with, `routed_bytes` what the experts take in the
    files. With `one_pool`, everything comes out of `available`; otherwise slots come out of the backend's own memory,
    and `available` is the host's. `host_tier_off` is why there is no host tier where there could be one.
    `notes` are sentences for the user.
    """

    demand: Demand
    classes: tuple[ClassPlan, ...]
    available: AvailableMemory
    one_pool: bool
    asked: MemoryRequest | None
    routed_bytes: int
    smallest_bytes: int
    notes: tuple[str, ...]
    asked_host: MemoryRequest | None = None
    host_tiering: HostTiering = DEFAULT_HOST_TIERING
    host_tier_off: str | None = None

    @property
    def expert_memory_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(plan.total_bytes for plan in self.classes)

    @property
    def host_memory_bytes(self) -> int:
        """Bytes of all host slots."""
        return sum(plan.host_memory_bytes for plan in self.classes)

    @property
    def staging_bytes(self) -> int:
        """Bytes of all staging buffers, in the host's memory; 0 where staging is the slot."""
        return sum(plan.staging_bytes for plan in self.classes)

    @property
    def device_bytes(self) -> int:
        """What comes out of the backend's own memory; 0 where there is one pool."""
        if self.one_pool:
            return 0
        return self.expert_memory_bytes + (self.demand.total_bytes if self.demand.on_device else 0)

    @property
    def host_bytes(self) -> int:
        """The most that comes out of `available` at once."""
        return sum(addend_bytes for _, addend_bytes in _host_addends(self.demand, self.classes, self.one_pool))

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that stays, slots of both kinds and staging buffers included."""
        return self.demand.total_bytes + self.expert_memory_bytes + self.host_memory_bytes + self.staging_bytes

    @property
    def _limited_by(self) -> str:
        """Which number decided, in brief; `available.reason` has the others."""
        limited = self.available.limit_path is not None and self.available.bytes < self.available.host_available_bytes
        return f"limited by {self.available.limit_path}" if limited else "as the whole host has"

    def as_table(self) -> tuple[tuple[str, str], ...]:
        """Rows of (what, how much) for people: every addend, the total and the available memory."""
        slots = tuple(
            (
                _slots(plan),
                f"{format_bytes(plan.total_bytes)}: each {format_bytes(plan.slot_bytes)}, in whole pages, for an "
                f"expert of {plan.size_class.expert_bytes} bytes",
            )
            for plan in self.classes
        )
        demand = tuple((what, format_bytes(addend_bytes)) for what, addend_bytes in _addends(self.demand, ()))
        if self.one_pool:
            pools = (*demand, *slots, ("total", format_bytes(self.total_bytes)))
        else:
            host = _host_addends(self.demand, self.classes, one_pool=False)
            pools = (
                *(demand if self.demand.on_device else ()),
                *slots,
                ("total on the device", format_bytes(self.device_bytes)),
                *((what, format_bytes(addend_bytes)) for what, addend_bytes in host),
                ("total on the host", format_bytes(self.host_bytes)),
            )
        return (
            *pools,
            ("available", f"{format_bytes(self.available.bytes)}, {self._limited_by}"),
            ("all routed experts in the files", format_bytes(self.routed_bytes)),
            ("smallest expert memory", format_bytes(self.smallest_bytes)),
        )

    def to_json(self) -> dict[str, object]:
        """The plan in JSON's own types; amounts are bytes."""
        return {
            "asked": None if self.asked is None else str(self.asked),
            "asked_host": None if self.asked_host is None else str(self.asked_host),
            "demand": {
                "resident_bytes": self.demand.resident_bytes,
                "kv_cache_bytes": self.demand.kv_cache_bytes,
                "workspace_bytes": self.demand.workspace_bytes,
                "context_tokens": self.demand.context_tokens,
                "on_device": self.demand.on_device,
            },
            "classes": [
                {
                    "layers": list(plan.size_class.layers),
                    "expert_bytes": plan.size_class.expert_bytes,
                    "expert_count": plan.size_class.expert_count,
                    "slot_bytes": plan.slot_bytes,
                    "slot_count": plan.slot_count,
                    "total_bytes": plan.total_bytes,
                    "host_slot_count": plan.host_slot_count,
                    "host_memory_bytes": plan.host_memory_bytes,
                    "staging_bytes": plan.staging_bytes,
                }
                for plan in self.classes
            ],
            "expert_memory_bytes": self.expert_memory_bytes,
            "host_memory_bytes": self.host_memory_bytes,
            "staging_bytes": self.staging_bytes,
            "host_tiering": self.host_tiering if self.host_memory_bytes else None,
            "host_tier_off": self.host_tier_off,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "smallest_bytes": self.smallest_bytes,
            "routed_bytes": self.routed_bytes,
            "total_bytes": self.total_bytes,
            "one_pool": self.one_pool,
            "available": {
                "bytes": self.available.bytes,
                "reason": self.available.reason,
                "host_available_bytes": self.available.host_available_bytes,
                "limit_bytes": self.available.limit_bytes,
                "limit_path": None if self.available.limit_path is None else str(self.available.limit_path),
            },
            "notes": list(self.notes),
        }


def smallest_expert_memory_bytes(checkpoint: Checkpoint) -> int:
    """The least bytes of slots that a step can run with: in each size class, room for the experts of one token."""
    return checkpoint.experts_per_token * sum(group.layout.slot_bytes for group in size_classes(checkpoint))


def make_plan(
    checkpoint: Checkpoint,
    demand: Demand,
    request: MemoryRequest | None,
    backend: PlanningBackend,
    available: AvailableMemory,
    *,
    host_request: MemoryRequest | None = None,
    host_tiering: HostTiering | None = None,
) -> Plan:
    """The plan for a run, or the refusal of it.

    Without a `request` the planner chooses, and where the backend grants less, shares that out among the size classes;
    a request is met to the letter or refused. So is the host tier's, but where every expert has a slot of its own: then
    there is no tier, which `host_tier_off` and a note say. 0 bytes turn it off.

    Raises BudgetTooSmall below what one step needs, DoesNotFit with the sum where memory does not suffice, ConfigError
    for a host tier that the backend does not have, BackendContractError where it grants more than was asked.
    """
    classes = size_classes(checkpoint)
    smallest = (checkpoint.experts_per_token,) * len(classes)
    every = tuple(size_class.expert_count for size_class in classes)
    smallest_bytes = smallest_expert_memory_bytes(checkpoint)
    one_pool = backend.host_memory_is_device_addressable()
    notes: list[str] = []
    by_default: str | None = None
    if host_request is not None and host_request.is_nothing:
        if host_tiering is not None and not backend.has_host_tier:
            notes.append(f"there is no host tier, and so none that is {host_tiering}: host memory of 0 was asked for")
    else:
        _refuse_what_is_no_host_tier(backend, host_request, host_tiering)

    if request is not None:
        slot_counts = _requested(request, checkpoint, classes, smallest, every)
    else:
        slot_counts, by_default = _by_default(demand, classes, smallest, every, one_pool, available)
    if one_pool:
        chosen = [ClassPlan(*planned) for planned in zip(classes, slot_counts, strict=True)]
        _refuse_what_does_not_fit(demand, chosen, smallest_bytes, one_pool, available)
    beside = demand if one_pool or demand.on_device else None
    granted, cuts = _granted(backend, beside, classes, smallest, slot_counts, request)
    if by_default is not None and not (one_pool and cuts):  # in one pool it says what was given, in two who gives it
        notes.append(by_default)
    notes.extend(cuts)
    if not one_pool:  # no sooner, because the backend says how much of the host's memory is staging
        _refuse_what_does_not_fit(demand, granted, smallest_bytes, one_pool, available)
    notes.extend(_thrashing(checkpoint, granted, is_cut=bool(cuts)))
    tiering = host_tiering or DEFAULT_HOST_TIERING
    host_tier_off = None
    if backend.has_host_tier:
        granted, host_tier_off = _with_host_tier(checkpoint, demand, granted, host_request, tiering, available, notes)
        if host_tier_off:
            notes.append(f"there is no host tier: {host_tier_off}")
    return Plan(
        demand=demand,
        classes=granted,
        available=available,
        one_pool=one_pool,
        asked=request,
        routed_bytes=checkpoint.routed_bytes,
        smallest_bytes=smallest_bytes,
        notes=tuple(notes),
        asked_host=host_request,
        host_tiering=tiering,
        host_tier_off=host_tier_off,
    )


def _refuse_what_is_no_host_tier(
    backend: PlanningBackend, request: MemoryRequest | None, tiering: HostTiering | None
) -> None:
    """Refuse what was asked of a host tier that cannot be, instead of ignoring it."""
    if backend.has_host_tier or (request is None and tiering is None):
        return
    asked = f"host memory of {request}" if request is not None else f"a host tier that is {tiering}"
    reason = (
        "its slots are host memory already, and a tier would keep the same bytes twice: give that memory to the slots"
        if backend.host_memory_is_device_addressable()
        else "it does not offer host slots (the hook alloc_host_slots)"
    )
    raise ConfigError(f"{asked} was asked for, but backend {backend.name!r} has no host tier: {reason}")


def _with_host_tier(
    checkpoint: Checkpoint,
    demand: Demand,
    plans: Sequence[ClassPlan],
    request: MemoryRequest | None,
    tiering: HostTiering,
    available: AvailableMemory,
    notes: list[str],
) -> tuple[tuple[ClassPlan, ...], str | None]:
    """The plans with host slots, or without them and the reason."""
    plans = tuple(plans)
    if all(plan.slot_count == plan.size_class.expert_count for plan in plans):
        return plans, "every expert has a slot of its own"
    if request is not None and request.is_nothing:
        return plans, "host memory of 0 was asked for"
    classes = [plan.size_class for plan in plans]
    every = [0 if plan.slot_count == plan.size_class.expert_count else plan.size_class.expert_count for plan in plans]
    beside_bytes = sum(addend_bytes for _, addend_bytes in _host_addends(demand, plans, one_pool=False))
    left_bytes = max(0, available.bytes - beside_bytes)
    if request is None:
        budget_bytes = left_bytes * DEFAULT_HOST_PERCENT // 100
    elif request.every_expert:
        budget_bytes = _slots_bytes(classes, every)
    else:
        budget_bytes = request.resolve(checkpoint.routed_bytes)
    counts = _distributed(budget_bytes, classes, [0] * len(classes), every)
    if not any(counts):
        smallest_bytes = min(plan.slot_bytes for plan, most in zip(plans, every, strict=True) if most)
        if request is not None:
            raise BudgetTooSmall(
                f"host memory of {request} is {budget_bytes} bytes, and a host slot has {smallest_bytes}: ask for more,"
                " or for 0 to have no host tier",
                smallest_bytes,
            )
        return plans, f"the host has {left_bytes} bytes left, and half of that is less than a slot"
    tiered = tuple(evolve(plan, host_slot_count=count) for plan, count in zip(plans, counts, strict=True))
    tier_bytes = sum(plan.host_memory_bytes for plan in tiered)
    if tier_bytes > left_bytes:
        addends = _host_addends(demand, tiered, one_pool=False)
        least_bytes = min(plan.slot_bytes for plan, most in zip(plans, every, strict=True) if most)
        fitting = MemoryRequest(size_bytes=round_down_bytes(left_bytes) if left_bytes >= least_bytes else 0)
        raise DoesNotFit(
            f"host memory of {request} does not fit into the host's memory:\n{_sum(addends)}\n"
            f"available are {format_bytes(available.bytes)}: {available.reason}\n"
            f"host memory of {fitting} would fit, in the {left_bytes} bytes that are left"
        )
    if request is None:
        notes.append(
            f"by default a host tier takes {DEFAULT_HOST_PERCENT} % of the {left_bytes} bytes that the host has left,"
            f" as far as there are experts for it: {tier_bytes} bytes"
        )
    notes += _without_host_slots(tiered, every, budget_bytes - tier_bytes, left_bytes)
    if tiering == "inclusive" and tier_bytes <= sum(plan.total_bytes for plan in tiered):
        notes.append(
            f"an inclusive host tier of {tier_bytes} bytes keeps little that the slots do not have themselves; more"
            " host memory or the exclusive kind would keep more"
        )
    return tiered, None


def _without_host_slots(
    tiered: Sequence[ClassPlan], every: Sequence[int], spare_bytes: int, left_bytes: int
) -> Iterator[str]:
    """Why, for each class that gets no host slots while another does.

    `spare_bytes` of the budget for host slots pay for none of them, and the host has `left_bytes` for all host slots.
    """
    for plan, most in zip(tiered, every, strict=True):
        if plan.host_slot_count:
            continue
        where = _layers(plan.size_class)
        if not most:
            yield f"there are no host slots for {where}: every expert there has a slot of its own"
            continue
        # No other class gets a larger fraction of its experts before this one gets its first slot.
        first = [
            1 if other is plan else min(limit, other.size_class.expert_count // plan.size_class.expert_count)
            for other, limit in zip(tiered, every, strict=True)
        ]
        enough_bytes = round_up_bytes(_slots_bytes([other.size_class for other in tiered], first))
        enough = MemoryRequest(size_bytes=enough_bytes)
        yield (
            f"there are no host slots for {where}, so that what is missed there is always read from the file: one takes"
            f" {plan.slot_bytes} bytes, and those of other layers leave {spare_bytes}"
            + (f"; host memory of {enough} pays for one" if enough_bytes <= left_bytes else "")
        )


def _requested(
    request: MemoryRequest,
    checkpoint: Checkpoint,
    classes: Sequence[SizeClass],
    smallest: Sequence[int],
    every: Sequence[int],
) -> tuple[int, ...]:
    if request.every_expert:
        return tuple(every)
    budget_bytes = request.resolve(checkpoint.routed_bytes)
    smallest_bytes = smallest_expert_memory_bytes(checkpoint)
    if budget_bytes < smallest_bytes:
        needs = ", ".join(
            f"{slot_count} slots of {size_class.layout.slot_bytes} bytes for {_layers(size_class)}"
            for size_class, slot_count in zip(classes, smallest, strict=True)
        )
        sufficient = MemoryRequest(size_bytes=round_up_bytes(smallest_bytes))
        # Fewer bytes than a page, and no whole K of them, are a number whose unit was left out.
        size_bytes = request.size_bytes or 0
        unitless = size_bytes < IO_ALIGNMENT_BYTES and size_bytes % 1000 > 0 and size_bytes % 1024 > 0
        meant = f"; did you mean {request.size_bytes}GiB?" if unitless else ""
        raise BudgetTooSmall(
            f"expert memory of {request} is {budget_bytes} bytes, and one step needs {smallest_bytes} bytes: "
            f"top-k is {checkpoint.experts_per_token}, so {needs}. "
            f"Ask for {sufficient} ({smallest_bytes} bytes) or more{meant}",
            smallest_bytes,
        )
    return _distributed(budget_bytes, classes, smallest, every)


def _by_default(
    demand: Demand,
    classes: Sequence[SizeClass],
    smallest: Sequence[int],
    every: Sequence[int],
    one_pool: bool,
    available: AvailableMemory,
) -> tuple[tuple[int, ...], str]:
    """The slots that the planner chooses by itself, and the sentence that says why."""
    if not one_pool:
        return tuple(every), "by default the backend's own memory takes as many experts as it grants"
    total_bytes = demand.total_bytes + _slots_bytes(classes, every)
    if total_bytes * 100 <= available.bytes * EVERYTHING_FITS_PERCENT:
        return tuple(every), (
            f"by default every expert has a slot, because everything together stays within {EVERYTHING_FITS_PERCENT} % "
            f"of the {available.bytes} bytes available"
        )
    left_bytes = max(0, available.bytes - demand.total_bytes)
    budget_bytes = left_bytes * DEFAULT_PERCENT // 100
    smallest_bytes = _slots_bytes(classes, smallest)
    if budget_bytes < smallest_bytes:
        return tuple(smallest), (
            f"by default slots take {DEFAULT_PERCENT} % of the {left_bytes} bytes left beside everything else; that is "
            f"less than one step needs, so they take the smallest that does: {smallest_bytes} bytes"
        )
    return _distributed(budget_bytes, classes, smallest, every), (
        f"by default slots take {DEFAULT_PERCENT} % of the {left_bytes} bytes left beside everything else: at most "
        f"{budget_bytes} bytes; the page cache and the rest of the system keep the others"
    )


def _distributed(
    budget_bytes: int, classes: Sequence[SizeClass], smallest: Sequence[int], most: Sequence[int]
) -> tuple[int, ...]:
    """As many slots as `budget_bytes` pays for, from the smallest set to the most, evening out the fractions.

    Each next slot goes to the class that would then have the smallest fraction of its experts, the first among
    equals; a class whose slot is too large for the rest is passed over, so that smaller slots use the rest up.
    """
    slot_counts = list(smallest)
    left_bytes = budget_bytes - _slots_bytes(classes, smallest)
    # A common denominator of the fractions keeps their comparison exact and in integers.
    experts = lcm(*(size_class.expert_count for size_class in classes))
    weights = [experts // size_class.expert_count for size_class in classes]
    growing = list(range(len(classes)))
    while growing:
        number = min(growing, key=lambda candidate: (slot_counts[candidate] + 1) * weights[candidate])
        slot_bytes = classes[number].layout.slot_bytes
        if slot_bytes <= left_bytes and slot_counts[number] < most[number]:
            slot_counts[number] += 1
            left_bytes -= slot_bytes
        else:
            growing.remove(number)
    return tuple(slot_counts)


def _refuse_what_does_not_fit(
    demand: Demand, plans: Sequence[ClassPlan], smallest_bytes: int, one_pool: bool, available: AvailableMemory
) -> None:
    """Refuse what the host cannot hold; of its own memory the backend is asked."""
    addends = _host_addends(demand, plans, one_pool)
    lacking_bytes = sum(addend_bytes for _, addend_bytes in addends) - available.bytes
    if lacking_bytes <= 0:
        return
    left_bytes = available.bytes - demand.total_bytes
    if one_pool:
        lacking_bytes = smallest_bytes - left_bytes
    if lacking_bytes <= 0:
        # Another run finds a little more or less available than this one.
        fitting = MemoryRequest(size_bytes=max(round_down_bytes(left_bytes - left_bytes // 32), smallest_bytes))
        advice = f"expert memory of {fitting} or less would fit into the {left_bytes} bytes that are left"
    else:
        needed = f"even with the smallest expert memory, {smallest_bytes} bytes, " if one_pool else ""
        kv_cache_bytes = demand.kv_cache_bytes if one_pool or not demand.on_device else 0
        saving = "a" if lacking_bytes <= kv_cache_bytes else "not even a"
        advice = f"{needed}{lacking_bytes} bytes are lacking; {saving} shorter context saves that much"
        if any(plan.staging_bytes for plan in plans):
            advice += "; fewer staging buffers save some, if the backend has an option for it"
    raise DoesNotFit(
        f"this does not fit into memory:\n{_sum(addends)}\n"
        f"available are {format_bytes(available.bytes)}: {available.reason}\n{advice}"
    )


def _granted(
    backend: PlanningBackend,
    beside: Demand | None,
    classes: Sequence[SizeClass],
    smallest: Sequence[int],
    slot_counts: Sequence[int],
    request: MemoryRequest | None,
) -> tuple[tuple[ClassPlan, ...], list[str]]:
    """The slots that the backend grants, of a request all of them, and notes of what it does not grant.

    `beside` is what else lies in their memory.
    """
    granted: list[ClassPlan] = []
    cuts: list[tuple[str, str]] = []  # what is granted of a class that gets fewer than were asked for, and why
    answers = _answers(backend, beside, classes, smallest, slot_counts)
    for (plan, reason), needed, asked in zip(answers, smallest, slot_counts, strict=True):
        if plan.slot_count < (needed if request is None else asked):
            wanted = f"one step needs {needed}"
            if request is not None:
                wanted = f"expert memory of {request} asks for {asked}; with none asked for, as many as fit are taken"
            later = map(ClassPlan, classes[len(granted) + 1 :], slot_counts[len(granted) + 1 :])
            addends = _addends(beside, [*granted, evolve(plan, slot_count=asked), *later])
            raise DoesNotFit(
                f"backend {backend.name!r} grants {plan.slot_count} of {asked} slots of {plan.slot_bytes} bytes for"
                f" {_layers(plan.size_class)}, and {wanted}: {reason}\n{_sum(addends)}"
            )
        granted.append(plan)
        if plan.slot_count < asked:
            cuts.append((f"{plan.slot_count} of {asked} slots for {_layers(plan.size_class)}", reason))
    if not cuts:
        return tuple(granted), []
    shared = _shared_out(backend, beside, granted, smallest, slot_counts)
    if shared == granted:
        return tuple(granted), [f"backend {backend.name!r} grants {cut}: {reason}" for cut, reason in cuts]
    shares = ", ".join(
        f"{plan.slot_count} of {asked} slots for {_layers(plan.size_class)}"
        for plan, asked in zip(shared, slot_counts, strict=True)
    )
    asked_bytes, shared_bytes = _slots_bytes(classes, slot_counts), sum(plan.total_bytes for plan in shared)
    note = (
        f"backend {backend.name!r} grants {shared_bytes} of {asked_bytes} bytes, which are shared out: {shares};"
        f" asked for all of them it said: {cuts[0][1]}"
    )
    return tuple(shared), [note]


def _answers(
    backend: PlanningBackend,
    beside: Demand | None,
    classes: Sequence[SizeClass],
    smallest: Sequence[int],
    slot_counts: Sequence[int],
) -> Iterator[tuple[ClassPlan, str]]:
    """What the backend grants of so many slots, class by class, with its reason.

    What later classes cannot do without counts as resident already.
    """
    plans: list[ClassPlan] = []
    for number, (size_class, asked) in enumerate(zip(classes, slot_counts, strict=True)):
        slot_bytes = size_class.layout.slot_bytes
        later_bytes = _slots_bytes(classes[number + 1 :], smallest[number + 1 :])
        slots_bytes = sum(plan.total_bytes for plan in plans) + later_bytes
        budget = backend.budget_for_expert_size(
            expert_bytes=slot_bytes,
            resident_bytes=slots_bytes + (beside.total_bytes if beside else 0),
            asked=asked,
            other_slots_bytes=slots_bytes,
        )
        if budget.slots > asked:
            raise BackendContractError(
                f"budget_for_expert_size granted {budget.slots} slots of {slot_bytes} bytes, and {asked} were asked for"
            )
        plans.append(ClassPlan(size_class, budget.slots, staging_bytes=budget.staging_bytes))
        yield plans[-1], budget.reason


def _shared_out(
    backend: PlanningBackend,
    beside: Demand | None,
    granted: list[ClassPlan],
    smallest: Sequence[int],
    most: Sequence[int],
) -> list[ClassPlan]:
    """What the backend grants if each class asks for its share of what was granted in all.

    Asked class by class for everything, it gives the first all that there is and the last what a step needs. Where its
    limit is one of each class instead of all together, or memory has gone meanwhile, it may cut the shares too: then
    that of the two answers is taken which leaves the least fraction of a class's experts the larger.
    """
    classes = [plan.size_class for plan in granted]
    shares = _distributed(sum(plan.total_bytes for plan in granted), classes, smallest, most)
    if list(shares) == [plan.slot_count for plan in granted]:
        return granted
    again = [plan for plan, _ in _answers(backend, beside, classes, smallest, shares)]
    if any(plan.slot_count < needed for plan, needed in zip(again, smallest, strict=True)):
        return granted
    return max(granted, again, key=_fractions)


def _fractions(plans: Sequence[ClassPlan]) -> list[Fraction]:
    """Which part of its experts each class has slots for, the smallest first."""
    return sorted(Fraction(plan.slot_count, plan.size_class.expert_count) for plan in plans)


def _thrashing(checkpoint: Checkpoint, plans: Sequence[ClassPlan], *, is_cut: bool) -> Iterator[str]:
    """A warning for each class that cannot hold what one token uses there: its experts return after their eviction.

    Where the backend has cut the plans, asking for more is no advice.
    """
    used = [checkpoint.experts_per_token * len(plan.size_class.layers) for plan in plans]
    enough_bytes = round_up_bytes(_slots_bytes([plan.size_class for plan in plans], used))
    enough = MemoryRequest(size_bytes=enough_bytes)
    advice = "" if is_cut else f"; expert memory of {enough} would hold what one token uses"
    for plan, per_token in zip(plans, used, strict=True):
        if plan.slot_count < per_token:
            yield (
                f"{_slots(plan)} are fewer than the {per_token} experts that one token uses there, so every token loads"
                f" most or all of them again{advice}"
            )


def _slots_bytes(classes: Sequence[SizeClass], slot_counts: Sequence[int]) -> int:
    return sum(
        size_class.layout.slot_bytes * slot_count for size_class, slot_count in zip(classes, slot_counts, strict=True)
    )


def _addends(demand: Demand | None, plans: Sequence[ClassPlan]) -> list[tuple[str, int]]:
    """What comes out of one memory: `demand`, unless it lies elsewhere, and the slots."""
    slots = [(_slots(plan), plan.total_bytes) for plan in plans]
    if demand is None:
        return slots
    return [
        ("resident weights", demand.resident_bytes),
        (f"KV cache of {demand.context_tokens} tokens", demand.kv_cache_bytes),
        ("workspace", demand.workspace_bytes),
        *slots,
    ]


def _host_addends(demand: Demand, plans: Sequence[ClassPlan], one_pool: bool) -> list[tuple[str, int]]:
    """What comes out of the host's memory, the most at once: weights pass through it on their way to a device."""
    if one_pool:
        return _addends(demand, plans)
    staging_bytes = sum(plan.staging_bytes for plan in plans)
    return [
        *([("resident weights while they load", demand.resident_bytes)] if demand.on_device else _addends(demand, ())),
        *([("staging buffers", staging_bytes)] if staging_bytes else []),
        *(
            (
                f"{plan.host_slot_count} host slot{'' if plan.host_slot_count == 1 else 's'} for"
                f" {_layers(plan.size_class)}",
                plan.host_memory_bytes,
            )
            for plan in plans
            if plan.host_slot_count
        ),
    ]


def _slots(plan: ClassPlan) -> str:
    return f"{plan.slot_count} slot{'' if plan.slot_count == 1 else 's'} for {_layers(plan.size_class)}"


def _sum(addends: Sequence[tuple[str, int]]) -> str:
    lines = [*addends, ("total", sum(addend_bytes for _, addend_bytes in addends))]
    return "\n".join(f"  {what}: {format_bytes(line_bytes)}" for what, line_bytes in lines)


def _layers(size_class: SizeClass) -> str:
    return name_layers(size_class.layers)
