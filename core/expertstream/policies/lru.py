"""Least recently used.

A pass over many tokens touches almost every expert once, which would wipe out what decode needs. So what prefill
touches ranks below everything that decode used, and among itself by how many tokens chose it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertstream import residency
from expertstream.compiling import Compiler
from expertstream.errors import ConfigError
from expertstream.residency import Ranks, Tables, lease, make_ranks, use_in_turn

_compiler = Compiler(__file__, residency.__file__)

_DECODE_EPOCH = 1 << 40  # above any number of tokens that a prompt can have


class Lru:
    """The policy to compare others with. `Ranks.share` is 0 in prefill, and the clock stands still."""

    def __init__(self, expert_count: int, half_life_tokens: int | None = None) -> None:
        if half_life_tokens is not None:
            raise ConfigError(
                f"a half-life of {half_life_tokens} tokens was asked for, but lru has none: leave half_life_tokens out,"
                " or use hotness"
            )
        self.ranks = make_ranks(expert_count)
        self.ranks.clock[0] = _DECODE_EPOCH
        self.layer_step: Callable[..., Any] = layer_step
        self.select: Callable[..., Any] = select

    def begin_pass(self, tokens: int) -> None:
        """Decode moves the clock; prefill does not."""
        self.ranks.share[0] = 1.0 if tokens == 1 else 0.0

    def seed(self, experts: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """As if decode had used them one by one, the hottest last; only the order of the scores counts."""
        use_in_turn(self.ranks, experts[::-1])


@_compiler.njit(nogil=True, cache=True)
def select(ranks: Ranks, first_expert: int, experts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """Note the use of each expert; `first_expert` is the number of the layer's expert 0."""
    if ranks.share[0] == 0.0:
        for i in range(experts.size):
            expert = first_expert + experts[i]
            ranks.last_use[expert] = max(ranks.last_use[expert], counts[i])
        return
    ranks.clock[0] += 1
    for i in range(experts.size):
        ranks.last_use[first_expert + experts[i]] = ranks.clock[0]


@_compiler.njit(nogil=True, cache=True)
def layer_step(
    tables: Tables,
    ranks: Ranks,
    layer: int,
    experts: NDArray[np.int64],
    counts: NDArray[np.int64],
    slots: NDArray[np.int64],
    found: NDArray[np.uint8],
) -> int:
    """Lease, then note the uses."""
    answer = lease(tables, ranks, layer, experts, slots, found)
    if answer >= 0:
        select(ranks, layer * (tables.slot_of.size // tables.slot_range.shape[0]), experts, counts)
    return answer
