"""Which expert sits in which slot: flat tables, and the compiled functions that are a layer step.

It owns lookup, leases and the choice of victims by a policy's ranks. It touches no bytes, holds no lock and
calls nothing back, so a thread without the GIL can run it; callers serialize their calls.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertstream.compiling import Compiler

_compiler = Compiler(__file__)

EMPTY, LOADING, READABLE, QUARANTINED, ABSENT, SPARE = 0, 1, 2, 3, 4, 5
"""What a slot is. QUARANTINED: a read that never returned may still write there; it is not used again. ABSENT: it is
not there yet. SPARE: readable, of an expert that is readable elsewhere too, so it goes before those that are not."""

READY, MISS, UNDERWAY = 0, 1, 2
"""What a leased expert is: readable now; to be loaded by the caller; being loaded for an earlier lease."""

EXHAUSTED, OUT_OF_RANGE = -1, -2
"""Answers of `lease` that leased nothing: too few slots are free of leases; an expert that does not exist."""


class Tables(NamedTuple):
    """The residency of a model. Experts are numbered layer * experts_per_layer + expert, slots across stores.

    slot_of (int32, experts): the slot of an expert or -1. expert_of (int32, slots): its inverse.
    state (uint8, slots). leases (int32, slots). turn (int32, slots): 0, or 1 + when the step under way will
    need what the slot holds. slot_range (int64, layers x 2): first and end of the slots that a layer may use. victims
    (int64, twice the experts of a layer): the slots that the last `lease` gave to experts that it missed, in their
    order. evicted (int64, experts of a layer): the experts that it took them from, -1 for none.
    """

    slot_of: NDArray[np.int32]
    expert_of: NDArray[np.int32]
    state: NDArray[np.uint8]
    leases: NDArray[np.int32]
    turn: NDArray[np.int32]
    slot_range: NDArray[np.int64]
    victims: NDArray[np.int64]
    evicted: NDArray[np.int64]


class Ranks(NamedTuple):
    """What a policy says of experts, float64 and int64 of their number: the lowest rank goes first, then the
    least recently used. `clock` (int64, 1) counts steps; `share` (float64, 1) is what one selection adds."""

    rank: NDArray[np.float64]
    last_use: NDArray[np.int64]
    clock: NDArray[np.int64]
    share: NDArray[np.float64]


def make_tables(layer_count: int, experts_per_layer: int, slot_range: NDArray[np.int64]) -> Tables:
    """Tables in which every slot is empty; `slot_range` as in Tables."""
    slot_count = int(slot_range.max(initial=0))
    return Tables(
        slot_of=np.full(layer_count * experts_per_layer, -1, np.int32),
        expert_of=np.full(slot_count, -1, np.int32),
        state=np.zeros(slot_count, np.uint8),
        leases=np.zeros(slot_count, np.int32),
        turn=np.zeros(slot_count, np.int32),
        slot_range=slot_range,
        victims=np.empty(2 * experts_per_layer, np.int64),
        evicted=np.empty(experts_per_layer, np.int64),
    )


def make_ranks(expert_count: int) -> Ranks:
    """Ranks of experts that were never selected."""
    return Ranks(
        np.zeros(expert_count, np.float64), np.zeros(expert_count, np.int64), np.zeros(1, np.int64), np.ones(1)
    )


def use_in_turn(ranks: Ranks, experts: NDArray[np.int64]) -> None:
    """Note a use of each of these distinct experts, one step after the other."""
    ranks.last_use[experts] = ranks.clock[0] + 1 + np.arange(experts.size)
    ranks.clock[0] += experts.size


@_compiler.njit(nogil=True, cache=True)
def lease(
    tables: Tables,
    ranks: Ranks,
    layer: int,
    experts: NDArray[np.int64],
    slots: NDArray[np.int64],
    found: NDArray[np.uint8],
) -> int:
    """Lease a slot for each expert of a layer, all or none; the answer is how many are not READY, or an error.

    Fills `slots` (-1 on an error) and `found` (READY, MISS or UNDERWAY). A MISS has its victim's slot already, in state
    LOADING. Victims are empty slots, then SPARE ones, then by rank and last use; never a leased, loading or quarantined
    slot, nor one that the step under way needs, unless nothing else is left: then the one whose turn comes last. What
    is leased has had its turn.
    """
    base = layer * (tables.slot_of.size // tables.slot_range.shape[0])
    experts_per_layer = tables.slot_of.size // tables.slot_range.shape[0]
    missing = 0
    waiting = 0
    for i in range(experts.size):
        if experts[i] < 0 or experts[i] >= experts_per_layer:
            release(tables, slots[:i])
            slots[:] = -1
            return OUT_OF_RANGE
        slot = tables.slot_of[base + experts[i]]
        slots[i] = slot
        if slot >= 0:
            found[i] = READY if tables.state[slot] in (READABLE, SPARE) else UNDERWAY
            waiting += found[i] == UNDERWAY
            tables.leases[slot] += 1
            tables.turn[slot] = 0
            continue
        found[i] = MISS
        for before in range(i):
            if experts[before] == experts[i]:  # named twice: the first one loads it
                found[i] = UNDERWAY
        waiting += found[i] == UNDERWAY
        missing += found[i] == MISS
    if missing == 0:
        return waiting
    victims = tables.victims[:missing]
    if victims.size < missing or _choose_victims(tables, ranks, layer, victims) < missing:
        release(tables, slots)
        slots[:] = -1
        return EXHAUSTED
    used = 0
    for i in range(experts.size):
        expert = base + experts[i]
        if found[i] == MISS:
            slot = victims[used]
            tables.evicted[used] = tables.expert_of[slot]
            used += 1
            _give(tables, slot, expert)
            slots[i] = slot
        elif slots[i] < 0:
            slots[i] = tables.slot_of[expert]
            tables.leases[slots[i]] += 1
    return missing + waiting


@_compiler.njit(nogil=True, cache=True)
def release(tables: Tables, slots: NDArray[np.int64]) -> None:
    """End one lease on each slot; -1 is none."""
    for i in range(slots.size):
        if slots[i] >= 0:
            tables.leases[slots[i]] -= 1


@_compiler.njit(nogil=True, cache=True)
def announce(tables: Tables, layer: int, experts: NDArray[np.int64], needed: bool) -> int:
    """Mark the resident ones of `experts` as needed in this order by the step under way, or take the marks away.

    The answer is how many are resident, or OUT_OF_RANGE with some marked.
    """
    experts_per_layer = tables.slot_of.size // tables.slot_range.shape[0]
    resident = 0
    for i in range(experts.size):
        if experts[i] < 0 or experts[i] >= experts_per_layer:
            return OUT_OF_RANGE
        slot = tables.slot_of[layer * experts_per_layer + experts[i]]
        if slot >= 0:
            resident += 1
            tables.turn[slot] = i + 1 if needed else 0
    return resident


@_compiler.njit(nogil=True, cache=True)
def free_slots(tables: Tables, layer: int, spare: bool) -> int:
    """How many slots of the layer's class could be given to a new expert now; `spare`: without what a step needs."""
    count = 0
    for slot in range(tables.slot_range[layer, 0], tables.slot_range[layer, 1]):
        is_free = tables.leases[slot] == 0 and tables.state[slot] in (EMPTY, READABLE, SPARE)
        if is_free and not (spare and tables.turn[slot] != 0):
            count += 1
    return count


@_compiler.njit(nogil=True, cache=True)
def exchange(
    tables: Tables,
    ranks: Ranks,
    layer: int,
    coming: NDArray[np.int64],
    leaving: NDArray[np.int64],
    slots: NDArray[np.int64],
    found: NDArray[np.uint8],
    taken: NDArray[np.int64],
    is_exclusive: bool,
) -> None:
    """A step of a host tier, whose slots these are: experts of a layer leave it upwards, and others come down.

    `slots` and `found` are of the experts `coming` up, as `lease` fills them: READY ones are leased where they are
    kept; a MISS is to be read, through a victim or through none (-1), and where `is_exclusive` the victim is EMPTY or
    SPARE. `leaving` are experts, counted across layers, that lose their slot above, -1 for none; `taken` is the slot
    that each must be copied to, LOADING and leased, or -1 where it is kept already, and no longer SPARE, or where there
    is no room. No victim is what the step under way will need: another staging buffer can take a read.
    """
    base = layer * (tables.slot_of.size // tables.slot_range.shape[0])
    missing = 0
    for i in range(coming.size):
        slot = tables.slot_of[base + coming[i]]
        if slot >= 0 and tables.state[slot] in (READABLE, SPARE):
            found[i] = READY
            slots[i] = slot
            tables.leases[slot] += 1
            tables.turn[slot] = 0
        else:
            found[i] = MISS
            slots[i] = -1
            missing += slot < 0
    homeless = 0
    for i in range(leaving.size):
        taken[i] = -1
        if leaving[i] >= 0:
            slot = tables.slot_of[leaving[i]]
            if slot < 0:
                homeless += 1
                continue
            tables.leases[slot] += 1  # so that it does not make room for the others that leave
            if tables.state[slot] == SPARE:
                tables.state[slot] = READABLE
    # The first victims are for what leaves, the others for what is read.
    count = _choose_victims(tables, ranks, layer, tables.victims[: homeless + missing])
    used = 0
    for i in range(leaving.size):
        if used < count and leaving[i] >= 0 and tables.slot_of[leaving[i]] < 0:
            if tables.turn[tables.victims[used]] != 0:
                break  # what the step under way will need is worth more than what leaves
            taken[i] = tables.victims[used]
            used += 1
            _give(tables, taken[i], leaving[i])
    for i in range(leaving.size):
        if leaving[i] >= 0 and taken[i] < 0 and tables.slot_of[leaving[i]] >= 0:
            tables.leases[tables.slot_of[leaving[i]]] -= 1
    for i in range(coming.size):
        if used < count and found[i] == MISS and tables.slot_of[base + coming[i]] < 0:
            slot = tables.victims[used]
            if tables.turn[slot] != 0 or (is_exclusive and tables.state[slot] not in (EMPTY, SPARE)):
                break  # all further ones are worth more
            used += 1
            slots[i] = slot
            _give(tables, slot, base + coming[i])


@_compiler.njit(nogil=True, cache=True)
def _give(tables: Tables, slot: int, expert: int) -> None:
    """The slot is LOADING and leased for `expert`, which counts across layers; what it held is nowhere."""
    if tables.expert_of[slot] >= 0:
        tables.slot_of[tables.expert_of[slot]] = -1
    tables.expert_of[slot] = expert
    tables.slot_of[expert] = slot
    tables.state[slot] = LOADING
    tables.leases[slot] = 1
    tables.turn[slot] = 0


@_compiler.njit(nogil=True, cache=True)
def settle(tables: Tables, slot: int) -> None:
    """A load is over: its slot is readable and no longer leased for it; a second time does nothing."""
    if tables.state[slot] == LOADING:
        tables.state[slot] = READABLE
        tables.leases[slot] -= 1


def publish(tables: Tables, slot: int) -> None:
    """The slot's bytes are readable."""
    if tables.state[slot] == LOADING:
        tables.state[slot] = READABLE


def forget(tables: Tables, slot: int, *, quarantine: bool) -> None:
    """The slot's load failed: its expert is nowhere. Leases on the slot stay until they are released.

    Without `quarantine` it also takes a slot out of quarantine.
    """
    expert = tables.expert_of[slot]
    if expert >= 0:
        tables.slot_of[expert] = -1
    tables.expert_of[slot] = -1
    tables.turn[slot] = 0
    tables.state[slot] = QUARANTINED if quarantine else EMPTY


@_compiler.njit(nogil=True, cache=True)
def _choose_victims(tables: Tables, ranks: Ranks, layer: int, victims: NDArray[np.int64]) -> int:
    """Fill `victims` with the slots to give up, first one first; the answer is how many there are."""
    chosen = 0
    wanted = victims.size
    if wanted == 0:
        return 0
    first, end = tables.slot_range[layer, 0], tables.slot_range[layer, 1]
    for slot in range(first, end):  # one pass, keeping the best `wanted` sorted: most slots lose to the last of them
        state = tables.state[slot]
        if tables.leases[slot] != 0 or state not in (EMPTY, READABLE, SPARE):
            continue
        if chosen == wanted and not _goes_before(tables, ranks, slot, victims[wanted - 1]):
            continue
        if chosen < wanted:
            chosen += 1
        place = chosen - 1
        while place > 0 and _goes_before(tables, ranks, slot, victims[place - 1]):
            victims[place] = victims[place - 1]
            place -= 1
        victims[place] = slot
    return chosen


@_compiler.njit(nogil=True, cache=True)
def _goes_before(tables: Tables, ranks: Ranks, slot: int, other: int) -> bool:
    """Is `slot` a better victim than `other`? Equals keep their order, so the lower slot goes first."""
    turn, other_turn = tables.turn[slot], tables.turn[other]
    if turn != other_turn:
        return bool(turn == 0 or (other_turn != 0 and turn > other_turn))
    expert, other_expert = tables.expert_of[slot], tables.expert_of[other]
    if expert < 0 or other_expert < 0:
        return bool(expert < 0 and other_expert >= 0)
    is_spare, other_is_spare = tables.state[slot] == SPARE, tables.state[other] == SPARE
    if is_spare != other_is_spare:
        return bool(is_spare)
    rank, other_rank = ranks.rank[expert], ranks.rank[other_expert]
    if rank != other_rank:
        return bool(rank < other_rank)
    return bool(ranks.last_use[expert] < ranks.last_use[other_expert])
