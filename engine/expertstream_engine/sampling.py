"""Which token comes next: the choice that a model's logits leave open.

It owns penalties, filters and the draw; it knows neither text nor model. The order is that of llama.cpp's default
chain: penalties, top-k, top-p, min-p, temperature, draw.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
from attrs import Attribute, field, frozen
from numpy.typing import NDArray

from expertstream.errors import ConfigError, ExpertstreamError, UsageError


class LogitsNotFinite(ExpertstreamError):
    """A model's logits hold NaN or infinity, so no choice among them would mean anything."""


def _temperature(settings: object, attribute: Attribute[float], value: object) -> None:
    if not (_is_number(value) and 0 <= value < math.inf):
        raise ConfigError(f"{attribute.name} is {value!r}; it must be a number from 0 up")


def _share(settings: object, attribute: Attribute[float], value: object) -> None:
    if not (_is_number(value) and 0 < value <= 1):
        raise ConfigError(f"{attribute.name} is {value!r}; it must be a number above 0 and at most 1")


def _ratio(settings: object, attribute: Attribute[float], value: object) -> None:
    if not (_is_number(value) and 0 <= value <= 1):
        raise ConfigError(f"{attribute.name} is {value!r}; it must be a number from 0 to 1")


def _penalty(settings: object, attribute: Attribute[float], value: object) -> None:
    if not (_is_number(value) and 0.01 <= value <= 100):
        raise ConfigError(f"{attribute.name} is {value!r}; it must be a number from 0.01 to 100, where 1 is off")


def _count(settings: object, attribute: Attribute[int], value: object) -> None:
    if not (_is_whole(value) and value >= 0):
        raise ConfigError(f"{attribute.name} is {value!r}; it must be a whole number from 0 up")


def _seed(settings: object, attribute: Attribute[int | None], value: object) -> None:
    if value is not None and not (_is_whole(value) and value >= 0):
        raise ConfigError(f"{attribute.name} is {value!r}; it must be a whole number from 0 up, or None")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@frozen
class SamplingSettings:
    """How to choose; as they stand, always the most likely token. Raises ConfigError for a wrong value.

    `top_k` 0, `top_p` 1, `min_p` 0 and `repeat_penalty` 1 are off. The penalty looks back over `repeat_last_n` tokens.
    With `seed` None the sampler draws one and tells it.
    """

    temperature: float = field(default=0.0, validator=_temperature)
    top_k: int = field(default=0, validator=_count)
    top_p: float = field(default=1.0, validator=_share)
    min_p: float = field(default=0.0, validator=_ratio)
    repeat_penalty: float = field(default=1.0, validator=_penalty)
    repeat_last_n: int = field(default=64, validator=_count)
    seed: int | None = field(default=None, validator=_seed)

    def draw_options(self) -> tuple[str, ...]:
        """Names of what is set and matters to draws alone."""
        unset = SamplingSettings()
        names = ("top_k", "top_p", "min_p", "seed")
        return tuple(name for name in names if getattr(self, name) != getattr(unset, name))


class Sampler:
    """Chooses one token after the other; for one thread. Equal settings, seed and logits give equal tokens."""

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings = settings
        self.seed: int = secrets.randbits(32) if settings.seed is None else settings.seed
        """What repeats this sampler's draws."""
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    @property
    def draws(self) -> bool:
        """Whether chance has a part in the choice."""
        return self._settings.temperature != 0

    def next(self, logits: NDArray[np.float32], recent: Sequence[int]) -> int:
        """The next token's id, from logits of shape (vocab,), which are left as they are.

        `recent` are the tokens so far, prompt included, latest last. At temperature 0 the lowest id among equals wins
        and nothing is drawn. Raises LogitsNotFinite, and UsageError for another shape or ids outside the vocabulary.
        """
        settings = self._settings
        _check(logits)
        logits = self._penalized(logits, recent)
        if not self.draws:
            return int(logits.argmax())
        tokens = _top_k(logits, settings.top_k)
        tokens = _top_p(logits, tokens, settings.top_p)
        tokens = _min_p(logits, tokens, settings.min_p)
        chosen = logits[tokens]
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to minus infinity
            scaled = (chosen - chosen.max()).astype(np.float64) / settings.temperature
            weights = np.exp(scaled.astype(np.float32))
        return int(tokens[_draw(weights, self._random.random())])

    def _penalized(self, logits: NDArray[np.float32], recent: Sequence[int]) -> NDArray[np.float32]:
        penalty, last_n = self._settings.repeat_penalty, self._settings.repeat_last_n
        if penalty == 1 or last_n == 0 or not len(recent):
            return logits
        repeated = np.unique(np.asarray(recent[-last_n:], np.int64))
        if repeated[0] < 0 or repeated[-1] >= logits.size:
            raise UsageError(
                f"recent has token ids from {repeated[0]} to {repeated[-1]}; the logits are of {logits.size} tokens"
            )
        penalized = logits.copy()
        values = logits[repeated]
        penalized[repeated] = np.where(values > 0, values / penalty, values * penalty)
        return penalized


def _check(logits: NDArray[np.float32]) -> None:
    if logits.ndim != 1 or not logits.size:
        raise UsageError(f"logits have the shape {logits.shape}; one row of the vocabulary's size is needed")
    finite = np.isfinite(logits)
    if not finite.all():
        wrong = np.flatnonzero(~finite)
        raise LogitsNotFinite(
            f"{wrong.size} of {logits.size} logits are not finite, the first is {logits[wrong[0]]} at token {wrong[0]}"
        )


def _top_k(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The `count` most likely tokens in ascending order of id, all for 0; of equals at the edge the lowest ids."""
    if count == 0 or count >= logits.size:
        return np.arange(logits.size)
    able = np.flatnonzero(logits >= _bound(logits, count))
    values = logits[able]
    edge = np.partition(values, values.size - count)[values.size - count]
    above = able[values > edge]
    return np.sort(np.concatenate([above, able[values == edge][: count - above.size]]))


def _bound(logits: NDArray[np.float32], count: int) -> np.float32:
    """A value that at least `count` logits reach and few more: selecting among those is much cheaper than among all.

    Each of the `count` largest maxima of disjoint groups of logits is one logit that reaches the smallest of them.
    """
    group_count = logits.size // _GROUP_TOKENS
    if count > group_count:
        return np.float32(logits.min())
    maxima = logits[: group_count * _GROUP_TOKENS].reshape(_GROUP_TOKENS, group_count).max(axis=0)
    return np.float32(np.partition(maxima, group_count - count)[group_count - count])


_GROUP_TOKENS = 32


def _top_p(logits: NDArray[np.float32], tokens: NDArray[np.int64], mass: float) -> NDArray[np.int64]:
    """The fewest most likely ones of `tokens` that together hold `mass` of their probability, at least one."""
    if mass >= 1:
        return tokens
    chosen = logits[tokens]
    weights = np.exp(chosen - chosen.max())
    needed = mass * weights.sum(dtype=np.float64)
    for looked_at in (_USUAL_NUCLEUS_TOKENS, chosen.size):
        most_first = np.sort(weights[_top_k(chosen, looked_at)])[::-1]
        held = np.cumsum(most_first, dtype=np.float64)
        if held[-1] >= needed:
            break
    return tokens[_top_k(chosen, int(np.searchsorted(held, needed)) + 1)]


_USUAL_NUCLEUS_TOKENS = 2048


def _min_p(logits: NDArray[np.float32], tokens: NDArray[np.int64], ratio: float) -> NDArray[np.int64]:
    """Those of `tokens` whose probability is at least `ratio` of the likeliest one's."""
    if ratio == 0:
        return tokens
    chosen = logits[tokens]
    kept: NDArray[np.bool_] = chosen >= chosen.max() + math.log(ratio)
    return tokens[kept]


def _draw(weights: NDArray[np.float32], uniform: float) -> int:
    """The place of `uniform`, in [0, 1), among intervals as long as the weights; a weight of 0 has no place."""
    ends = np.cumsum(weights, dtype=np.float64)
    # The product stays below the last end: 1 - 2**-53 is the largest uniform, and that much rounds down from any end.
    return int(np.searchsorted(ends, uniform * ends[-1], side="right"))
