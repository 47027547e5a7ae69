"""Which kind of host tier finds more, on a recorded routing: hits of slots, hits of the tier, and what must be read.

usage: python bench/host_tiers.py TRACE.npz ... [--arms SLOTS/HOST ...]

Replays a trace layer step by layer step through the tables and the policy that a run uses; every miss ends at once. A
trace is an npz file with `experts` (int16, tokens x layers x top-k, -1 for none). Arms are SLOTS/HOST in percent of all
experts. Prints one line an arm and kind, in percent of the experts needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from expertstream import residency
from expertstream.host_tier import HostTier, TierClass
from expertstream.policies import make_policy


class Nothing:
    """Stands for a store, its host slots and their backend, where no bytes are moved."""

    layout = type("Layout", (), {"slot_bytes": 1})

    def __init__(self, slot_count: int = 0) -> None:
        self.slot_count = slot_count

    def alloc_host_slots(self, store: object, slot_count: int) -> Nothing:
        return Nothing(slot_count)

    def asked(self, what: str, call: Callable[[], None]) -> None:
        pass

    def keep(self, slot: int, host_slot: int) -> None:
        pass


def replay(routing: NDArray[np.int16], slot_count: int, host_slots: int, kind: str) -> tuple[float, float]:
    """Hits of slots and of the host tier, as parts of all experts needed."""
    tokens, layers, _ = routing.shape
    experts = int(routing.max()) + 1
    nothing: Any = Nothing()
    policy = make_policy("hotness", layers * experts)
    tables = residency.make_tables(layers, experts, np.array([[0, slot_count]] * layers, np.int64))
    planned = TierClass(nothing, tuple(range(layers)), host_slots)
    tier = HostTier(nothing, [planned], layers, experts, cast(Any, RLock()), is_exclusive=kind == "exclusive")
    tier.grow()
    while tier.state.is_growing:
        pass
    hits = host_hits = needed = 0
    for token in range(tokens):
        policy.begin_pass(1)
        for layer in range(layers):
            wanted = np.unique(routing[token, layer][routing[token, layer] >= 0]).astype(np.int64)
            slots, found = np.empty(wanted.size, np.int64), np.empty(wanted.size, np.uint8)
            policy.layer_step(tables, policy.ranks, layer, wanted, np.ones_like(wanted), slots, found)
            missed = np.flatnonzero(found == residency.MISS)
            if missed.size:
                numbers, leaving = np.full(missed.size, -1, np.int64), tables.evicted[: missed.size].copy()
                kept = tier.lease(policy.ranks, layer, wanted[missed], numbers, leaving, slots[missed].tolist())
                host_hits += int(kept.sum())
                for slot, number in zip(slots[missed].tolist(), numbers.tolist(), strict=True):
                    residency.publish(tables, slot)
                    if number >= 0:
                        tier.publish(number)
            residency.release(tables, slots)
            hits += wanted.size - missed.size
            needed += wanted.size
    return hits / needed, host_hits / needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="+")
    parser.add_argument("--arms", nargs="+", default=["12.5/12.5", "12.5/50", "25/25", "25/50", "50/25", "50/50"])
    options = parser.parse_args()
    for path in options.trace:
        routing = np.load(path, allow_pickle=False)["experts"]
        total = routing.shape[1] * (int(routing.max()) + 1)
        print(f"{path.stem}: {routing.shape[0]} tokens, {total} experts")
        for arm in options.arms:
            slots, host = (int(total * float(share) / 100) for share in arm.split("/"))
            for kind in ("inclusive", "exclusive"):
                hits, host_hits = replay(routing, slots, host, kind)
                read = 1 - hits - host_hits
                print(f"{arm:>10} {kind}: slots {100 * hits:.1f}, tier {100 * host_hits:.1f}, read {100 * read:.1f}")


if __name__ == "__main__":
    main()
