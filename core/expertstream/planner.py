"""How many slots each size class gets, and whether everything fits: one answer for showing a plan and for loading.

Pure and exact: integers in, integers out, no file, clock or device. It asks the backend and reads no memory itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import lcm
from typing import Protocol

from attrs import field, frozen, validators

from expertstream.checkpoint.index import Checkpoint
from expertstream.errors import BackendContractError, BudgetTooSmall, DoesNotFit
from expertstream.machine import AvailableMemory
from expertstream.size_classes import SizeClass, size_classes
from expertstream.slots import IO_ALIGNMENT_BYTES, SlotBudget
from expertstream.units import MemoryRequest, format_bytes, round_down_bytes, round_up_bytes

EVERYTHING_FITS_PERCENT = 90
"""By default every expert gets a slot where all of it stays within this part of the available memory."""

DEFAULT_PERCENT = 75
"""Otherwise slots take this part of what is left. As big as fits is slower: the page cache and the rest of the
system need room, and where memory runs out speed collapses instead of falling."""


class PlanningBackend(Protocol):
    """What the planner asks a backend; see `expertstream.hookspecs` for what the answers mean."""

    def host_memory_is_device_addressable(self) -> bool:
        """True where slots come out of the same memory as everything else."""
        ...

    def budget_for_expert_size(self, expert_bytes: int, resident_bytes: int, asked: int | None) -> SlotBudget:
        """How many slots of `expert_bytes` fit beside `resident_bytes`, at most `asked`."""
        ...


@frozen(kw_only=True)
class Demand:
    """What a run needs besides slots, in bytes. The engine computes it; `context_tokens` is what the KV cache holds."""

    resident_bytes: int = field(validator=validators.ge(0))
    kv_cache_bytes: int = field(validator=validators.ge(0))
    workspace_bytes: int = field(validator=validators.ge(0))
    context_tokens: int = field(validator=validators.ge(0))

    @property
    def total_bytes(self) -> int:
        """The sum of the three."""
        return self.resident_bytes + self.kv_cache_bytes + self.workspace_bytes


@frozen
class ClassPlan:
    """The slots of one size class."""

    size_class: SizeClass
    slot_count: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, padding included."""
        return self.size_class.layout.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots of this class."""
        return self.slot_count * self.slot_bytes


@frozen(kw_only=True)
class Plan:
    """What will be allocated, next to what was asked for and what there is.

    `smallest_bytes` is the least expert memory that a step can run with, `routed_bytes` what the experts take in the
    files. With `one_pool`, everything comes out of `available`; otherwise slots come out of the backend's own memory.
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

    @property
    def expert_memory_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(plan.total_bytes for plan in self.classes)

    @property
    def total_bytes(self) -> int:
        """Bytes of everything, slots included."""
        return self.demand.total_bytes + self.expert_memory_bytes

    @property
    def _limited_by(self) -> str:
        """Which number decided, in brief; `available.reason` has the others."""
        limited = self.available.limit_path is not None and self.available.bytes < self.available.host_available_bytes
        return f"limited by {self.available.limit_path}" if limited else "as the whole host has"

    def as_table(self) -> tuple[tuple[str, str], ...]:
        """Rows of (what, how much) for people: every addend, the total and the available memory."""
        return (
            *((what, format_bytes(addend_bytes)) for what, addend_bytes in _addends(self.demand, ())),
            *(
                (
                    _slots(plan),
                    f"{format_bytes(plan.total_bytes)}: each {format_bytes(plan.slot_bytes)}, in whole pages, for an "
                    f"expert of {plan.size_class.expert_bytes} bytes",
                )
                for plan in self.classes
            ),
            ("total", format_bytes(self.total_bytes)),
            ("available", f"{format_bytes(self.available.bytes)}, {self._limited_by}"),
            ("all routed experts in the files", format_bytes(self.routed_bytes)),
            ("smallest expert memory", format_bytes(self.smallest_bytes)),
        )

    def to_json(self) -> dict[str, object]:
        """The plan in JSON's own types; amounts are bytes."""
        return {
            "asked": None if self.asked is None else str(self.asked),
            "demand": {
                "resident_bytes": self.demand.resident_bytes,
                "kv_cache_bytes": self.demand.kv_cache_bytes,
                "workspace_bytes": self.demand.workspace_bytes,
                "context_tokens": self.demand.context_tokens,
            },
            "classes": [
                {
                    "layers": list(plan.size_class.layers),
                    "expert_bytes": plan.size_class.expert_bytes,
                    "expert_count": plan.size_class.expert_count,
                    "slot_bytes": plan.slot_bytes,
                    "slot_count": plan.slot_count,
                    "total_bytes": plan.total_bytes,
                }
                for plan in self.classes
            ],
            "expert_memory_bytes": self.expert_memory_bytes,
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
) -> Plan:
    """The plan for a run, or the refusal of it.

    Without a `request` the planner chooses, and takes less where the backend grants less; a request is met to the
    letter or refused. Raises BudgetTooSmall below what one step needs, DoesNotFit with the sum where memory does not
    suffice, BackendContractError where the backend grants more than was asked.
    """
    classes = size_classes(checkpoint)
    smallest = (checkpoint.experts_per_token,) * len(classes)
    every = tuple(size_class.expert_count for size_class in classes)
    smallest_bytes = smallest_expert_memory_bytes(checkpoint)
    one_pool = backend.host_memory_is_device_addressable()
    notes: list[str] = []

    if request is not None:
        slot_counts = _requested(request, checkpoint, classes, smallest, every)
    else:
        slot_counts, note = _by_default(demand, classes, smallest, every, one_pool, available)
        notes.append(note)
    _refuse_what_does_not_fit(demand, classes, slot_counts, smallest_bytes, one_pool, available)
    granted = _granted(backend, demand, classes, smallest, slot_counts, request, notes)
    notes.extend(_thrashing(checkpoint, granted))
    return Plan(
        demand=demand,
        classes=granted,
        available=available,
        one_pool=one_pool,
        asked=request,
        routed_bytes=checkpoint.routed_bytes,
        smallest_bytes=smallest_bytes,
        notes=tuple(notes),
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
        # Fewer bytes than a page are a number whose unit was left out.
        unitless = request.size_bytes is not None and 0 < request.size_bytes < IO_ALIGNMENT_BYTES
        meant = f"; did you mean {request.size_bytes}GiB?" if unitless else ""
        raise BudgetTooSmall(
            f"expert memory of {request} is {budget_bytes} bytes, and one step needs {smallest_bytes} bytes: "
            f"top-k is {checkpoint.experts_per_token}, so {needs}. "
            f"Ask for {sufficient} ({smallest_bytes} bytes) or more{meant}",
            smallest_bytes,
        )
    return _distributed(budget_bytes, classes, smallest)


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
    return _distributed(budget_bytes, classes, smallest), (
        f"by default slots take {DEFAULT_PERCENT} % of the {left_bytes} bytes left beside everything else: at most "
        f"{budget_bytes} bytes; the page cache and the rest of the system keep the others"
    )


def _distributed(budget_bytes: int, classes: Sequence[SizeClass], smallest: Sequence[int]) -> tuple[int, ...]:
    """As many slots as `budget_bytes` pays for, beginning with the smallest set, then evening out the fractions.

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
        if slot_bytes <= left_bytes and slot_counts[number] < classes[number].expert_count:
            slot_counts[number] += 1
            left_bytes -= slot_bytes
        else:
            growing.remove(number)
    return tuple(slot_counts)


def _refuse_what_does_not_fit(
    demand: Demand,
    classes: Sequence[SizeClass],
    slot_counts: Sequence[int],
    smallest_bytes: int,
    one_pool: bool,
    available: AvailableMemory,
) -> None:
    slots = [ClassPlan(*planned) for planned in zip(classes, slot_counts, strict=True)] if one_pool else []
    addends = _addends(demand, slots)
    if sum(addend_bytes for _, addend_bytes in addends) <= available.bytes:
        return
    left_bytes = available.bytes - demand.total_bytes
    lacking_bytes = (smallest_bytes if one_pool else 0) - left_bytes
    if lacking_bytes <= 0:
        fitting = MemoryRequest(size_bytes=max(round_down_bytes(left_bytes), smallest_bytes))
        advice = f"expert memory of {fitting} ({left_bytes} bytes) or less would fit"
    else:
        needed = f"even with the smallest expert memory, {smallest_bytes} bytes, " if one_pool else ""
        saving = "a" if lacking_bytes <= demand.kv_cache_bytes else "not even a"
        advice = f"{needed}{lacking_bytes} bytes are lacking; {saving} shorter context saves that much"
    raise DoesNotFit(
        f"this does not fit into memory:\n{_sum(addends)}\n"
        f"available are {format_bytes(available.bytes)}: {available.reason}\n{advice}"
    )


def _granted(
    backend: PlanningBackend,
    demand: Demand,
    classes: Sequence[SizeClass],
    smallest: Sequence[int],
    slot_counts: Sequence[int],
    request: MemoryRequest | None,
    notes: list[str],
) -> tuple[ClassPlan, ...]:
    """The slots that the backend grants. What later classes cannot do without counts as resident already."""
    plans: list[ClassPlan] = []
    for number, (size_class, asked, needed) in enumerate(zip(classes, slot_counts, smallest, strict=True)):
        slot_bytes = size_class.layout.slot_bytes
        later_bytes = _slots_bytes(classes[number + 1 :], smallest[number + 1 :])
        other_bytes = demand.total_bytes + sum(plan.total_bytes for plan in plans) + later_bytes
        budget = backend.budget_for_expert_size(expert_bytes=slot_bytes, resident_bytes=other_bytes, asked=asked)
        if budget.slots > asked:
            raise BackendContractError(
                f"budget_for_expert_size granted {budget.slots} slots of {slot_bytes} bytes, and {asked} were asked for"
            )
        if budget.slots < (needed if request is None else asked):
            addends = _addends(demand, [*plans, ClassPlan(size_class, asked)])
            wanted = f"one step needs {needed}" if request is None else f"expert memory of {request} is {asked}"
            raise DoesNotFit(
                f"the backend grants {budget.slots} slots of {slot_bytes} bytes for {_layers(size_class)}, "
                f"and {wanted}: {budget.reason}\n{_sum(addends)}"
            )
        if budget.slots < asked:
            notes.append(
                f"the backend grants {budget.slots} of {asked} slots for {_layers(size_class)}: {budget.reason}"
            )
        plans.append(ClassPlan(size_class, budget.slots))
    return tuple(plans)


def _thrashing(checkpoint: Checkpoint, plans: Sequence[ClassPlan]) -> Iterator[str]:
    """A warning for each class that cannot hold what one token uses there: its experts return after their eviction."""
    for plan in plans:
        per_token = checkpoint.experts_per_token * len(plan.size_class.layers)
        if plan.slot_count < per_token:
            yield (
                f"{_slots(plan)} are fewer than the {per_token} experts that "
                f"one token uses there; below {per_token * plan.slot_bytes} bytes every token reads nearly all of them "
                "from the file again"
            )


def _slots_bytes(classes: Sequence[SizeClass], slot_counts: Sequence[int]) -> int:
    return sum(
        size_class.layout.slot_bytes * slot_count for size_class, slot_count in zip(classes, slot_counts, strict=True)
    )


def _addends(demand: Demand, plans: Sequence[ClassPlan]) -> list[tuple[str, int]]:
    return [
        ("resident weights", demand.resident_bytes),
        (f"KV cache of {demand.context_tokens} tokens", demand.kv_cache_bytes),
        ("workspace", demand.workspace_bytes),
        *((_slots(plan), plan.total_bytes) for plan in plans),
    ]


def _slots(plan: ClassPlan) -> str:
    return f"{plan.slot_count} slot{'' if plan.slot_count == 1 else 's'} for {_layers(plan.size_class)}"


def _sum(addends: Sequence[tuple[str, int]]) -> str:
    lines = [*addends, ("total", sum(addend_bytes for _, addend_bytes in addends))]
    return "\n".join(f"  {what}: {format_bytes(line_bytes)}" for what, line_bytes in lines)


def _layers(size_class: SizeClass) -> str:
    """The layers of a class, runs of them joined: "layers 0-2, 5"."""
    runs = [
        [layer for _, layer in run]
        for _, run in groupby(enumerate(size_class.layers), key=lambda numbered: numbered[1] - numbered[0])
    ]
    named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' if len(size_class.layers) > 1 else ''} {named}"
