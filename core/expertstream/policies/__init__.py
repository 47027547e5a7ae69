"""Which expert goes when a slot is needed: the policies by name.

A policy is pure and deterministic: it ranks experts in arrays that the compiled layer step reads.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expertstream.errors import ConfigError
from expertstream.policies.hotness import Hotness
from expertstream.policies.lru import Lru
from expertstream.residency import Ranks, announce, exchange, free_slots, lease, make_tables, release, settle

__all__ = ["Policy", "make_policy", "policy_names", "prepare_step"]


class Policy(Protocol):
    """What the streamer asks of a policy.

    Two compiled functions that run without the GIL and allocate nothing:
    `layer_step(tables, ranks, layer, experts, counts, slots, found)` selects and leases, answering as
    `residency.lease` does; `select(ranks, first_expert, experts, counts)` is its first half, for steps that run in
    rounds. `counts` (int64) is how many tokens of the pass chose each expert.
    """

    ranks: Ranks
    layer_step: Callable[..., Any]
    select: Callable[..., Any]

    def begin_pass(self, tokens: int) -> None:
        """A forward pass over `tokens` tokens begins: one in decode, many in prefill."""
        ...

    def seed(self, experts: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Rank experts that are loaded before the first pass, hottest first, by what an earlier run scored them."""
        ...


_POLICIES: dict[str, Callable[[int, int | None], Policy]] = {"hotness": Hotness, "lru": Lru}


def policy_names() -> tuple[str, ...]:
    """The names that the configuration may ask for."""
    return tuple(sorted(_POLICIES))


def prepare_step(name: str) -> None:
    """Compile the layer step of a policy, or take it from its cache: seconds on a first run, then milliseconds.

    Without it the first step does the same.
    """
    policy, tables = make_policy(name, 1), make_tables(1, 1, np.array([[0, 1]], np.int64))
    expert, slots, found = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.uint8)
    policy.select(policy.ranks, 0, expert, expert)
    policy.layer_step(tables, policy.ranks, 0, expert, expert, slots, found)
    announce(tables, 0, expert, True)
    lease(tables, policy.ranks, 0, expert, slots, found)
    release(tables, slots)
    free_slots(tables, 0, True)
    exchange(tables, policy.ranks, 0, expert, expert, slots, found, slots.copy(), True)
    settle(tables, 0)


def make_policy(name: str, expert_count: int, half_life_tokens: int | None = None) -> Policy:
    """The policy called `name` for that many experts; None is its own half-life.

    Raises ConfigError for an unknown name, and for a half-life where a policy has none.
    """
    if name not in _POLICIES:
        near = get_close_matches(name, _POLICIES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no policy is called {name!r}; there are {', '.join(policy_names())}{hint}")
    return _POLICIES[name](expert_count, half_life_tokens)
