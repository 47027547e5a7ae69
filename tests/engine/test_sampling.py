"""The next token is drawn from the distribution that the settings describe, and can be drawn again."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from expertstream.errors import ConfigError, ExpertstreamError, UsageError
from expertstream_engine.sampling import LogitsNotFinite, Sampler, SamplingSettings

DRAWS = 5_000
untimed = settings(deadline=None)
LOGITS = arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-20, 20, width=32))


def f32(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def distribution(logits: NDArray[np.float32], recent: list[int], settings: SamplingSettings) -> NDArray[np.float64]:
    """The chain of filters word for word, one token at a time."""
    values = {token: float(value) for token, value in enumerate(logits)}
    for token in set(
        recent[len(recent) - settings.repeat_last_n :] if settings.repeat_last_n < len(recent) else recent
    ):
        positive = values[token] > 0
        values[token] = values[token] / settings.repeat_penalty if positive else values[token] * settings.repeat_penalty
    ranked = sorted(values, key=lambda token: (-values[token], token))
    if settings.top_k:
        ranked = ranked[: settings.top_k]
    masses = np.exp(np.array([values[token] - values[ranked[0]] for token in ranked]))
    held, kept = 0.0, []
    for token, mass in zip(ranked, masses / masses.sum(), strict=True):
        kept.append(token)
        held += mass
        if held >= settings.top_p:
            break
    if settings.min_p:
        kept = [token for token in kept if np.exp(values[token] - values[ranked[0]]) >= settings.min_p]
    probabilities = np.zeros(logits.size)
    probabilities[kept] = np.exp([(values[token] - values[ranked[0]]) / settings.temperature for token in kept])
    return probabilities / probabilities.sum()


FIVE = f32(1.0, 3.0, -2.0, 2.5, 0.0)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "top_k": 99},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 0.01},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 4, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.5},
        {"temperature": 1.0, "repeat_penalty": 4.0},
        {"temperature": 1.0, "repeat_penalty": 4.0, "repeat_last_n": 2},
        {"temperature": 1.0, "repeat_penalty": 0.5},
    ],
)
def test_tokens_are_drawn_as_often_as_the_chain_of_filters_says(asked: dict[str, Any]) -> None:
    recent = [1, 2, 3, 3]
    sampler = Sampler(SamplingSettings(**asked, seed=20))
    counts = np.bincount([sampler.next(FIVE, recent) for _ in range(DRAWS)], minlength=FIVE.size)
    expected = distribution(FIVE, recent, SamplingSettings(**asked))
    assert not counts[expected == 0].any()
    # Five standard deviations of a binomial count.
    assert np.all(abs(counts - DRAWS * expected) <= 5 * np.sqrt(DRAWS * expected * (1 - expected)) + 1e-9)


@untimed
@given(
    logits=LOGITS,
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64),
)
@example(logits=np.zeros(40, np.float32), top_k=3, top_p=1.0, min_p=0.0, seed=1)
def test_a_token_outside_the_filters_is_never_drawn(
    logits: NDArray[np.float32], top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    settings = SamplingSettings(temperature=1.5, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    # At the edge of a filter rounding decides; within a thousandth of it either answer is right.
    loose = SamplingSettings(temperature=1.5, top_k=top_k, top_p=min(1, top_p * 1.001), min_p=min_p * 0.999)
    possible = distribution(logits, [], loose)
    sampler = Sampler(settings)
    assert all(possible[sampler.next(logits, [])] > 0 for _ in range(20))


@untimed
@given(logits=LOGITS, seed=st.integers(0, 99))
def test_top_k_of_one_is_the_greedy_choice_and_the_lowest_id_among_equals(
    logits: NDArray[np.float32], seed: int
) -> None:
    best = min(range(logits.size), key=lambda token: (-logits[token], token))
    assert Sampler(SamplingSettings()).next(logits, []) == best
    assert Sampler(SamplingSettings(temperature=2.0, top_k=1, seed=seed)).next(logits, []) == best
    assert Sampler(SamplingSettings(temperature=1e-300, top_k=1, seed=seed)).next(logits, []) == best


@pytest.mark.parametrize("vocab_size", [31, 5000, 151_936])
@pytest.mark.parametrize("spread", [0.001, 3.0])
def test_filters_choose_the_same_tokens_in_a_vocabulary_of_any_size(vocab_size: int, spread: float) -> None:
    # Whole multiples of an eighth of the spread: many equal logits, so that ties lie on every edge.
    grid = np.random.default_rng(vocab_size).standard_normal(vocab_size) * 8
    logits = (np.round(grid) / 8 * spread).astype(np.float32)
    by_rank = np.lexsort((np.arange(vocab_size), -logits))
    for top_k, draws in ((1, 1), (20, 500), (4000, 50), (vocab_size - 1, 50)):
        allowed = by_rank[:top_k].tolist()
        sampler = Sampler(SamplingSettings(temperature=50.0, top_k=top_k, seed=3))
        drawn = {sampler.next(logits, []) for _ in range(draws)}
        assert drawn == set(allowed) if top_k <= 20 else drawn <= set(allowed)
    masses = np.exp(logits[by_rank].astype(np.float64) - logits.max())
    held = np.cumsum(masses) / masses.sum()
    for top_p in (0.05, 0.7, 0.99):
        possible = set(by_rank[: np.searchsorted(held, min(1, top_p * 1.0001)) + 1].tolist())
        sampler = Sampler(SamplingSettings(temperature=50.0, top_p=top_p, seed=3))
        assert {sampler.next(logits, []) for _ in range(30)} <= possible


def test_the_penalty_lowers_a_repeated_token_whatever_its_sign_and_only_once() -> None:
    greedy = Sampler(SamplingSettings(repeat_penalty=2.0, repeat_last_n=3))
    assert greedy.next(f32(3.0, 2.0, 1.0), [0]) == 1
    assert greedy.next(f32(3.0, 1.4, 1.0), [0, 0, 0]) == 0
    assert greedy.next(f32(-1.0, -1.5, -9.0), [0]) == 1
    assert greedy.next(f32(3.0, 2.0, 1.0), [0, 2, 2, 2]) == 0
    assert greedy.next(f32(3.0, 2.0, 1.0), []) == 0
    off = Sampler(SamplingSettings(repeat_penalty=2.0, repeat_last_n=0))
    assert off.next(f32(3.0, 2.0, 1.0), [0]) == 0


def test_the_callers_logits_are_left_as_they_are() -> None:
    logits = FIVE.copy()
    logits.flags.writeable = False
    settings = SamplingSettings(temperature=1.0, top_k=3, top_p=0.9, min_p=0.01, repeat_penalty=1.3)
    Sampler(settings).next(logits, [0, 1])
    assert np.array_equal(logits, FIVE)


def test_the_same_seed_draws_the_same_tokens_and_a_drawn_seed_is_told() -> None:
    def draws(seed: int | None) -> tuple[int, list[int]]:
        sampler = Sampler(SamplingSettings(temperature=1.0, seed=seed))
        return sampler.seed, [sampler.next(np.zeros(1000, np.float32), []) for _ in range(20)]

    seed, tokens = draws(None)
    assert draws(seed) == (seed, tokens)
    assert draws(5) == draws(5)
    assert draws(5)[1] != draws(6)[1] != tokens


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(wrong: float, temperature: float) -> None:
    with pytest.raises(LogitsNotFinite, match=r"1 of 3 .* at token 1") as refusal:
        Sampler(SamplingSettings(temperature=temperature)).next(f32(1.0, wrong, 2.0), [])
    assert isinstance(refusal.value, ExpertstreamError)


@pytest.mark.parametrize("logits", [np.zeros((1, 3), np.float32), f32()])
def test_logits_of_another_shape_are_refused(logits: NDArray[np.float32]) -> None:
    with pytest.raises(UsageError, match=r"shape \("):
        Sampler(SamplingSettings()).next(logits, [])


@pytest.mark.parametrize("token", [-1, 3])
def test_recent_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(UsageError, match="3 tokens"):
        Sampler(SamplingSettings(repeat_penalty=1.1)).next(f32(1.0, 2.0, 3.0), [token])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", float("inf")),
        ("repeat_last_n", -1),
        ("seed", -1),
        *itertools.product(["temperature", "top_p", "min_p", "repeat_penalty"], ["1", None, True, [1.0], 1j]),
        *itertools.product(["top_k", "repeat_last_n"], ["1", None, True, 2.5, 2.0, [1]]),
        *itertools.product(["seed"], ["1", True, 2.5, [1]]),
    ],
)
def test_a_wrong_setting_is_refused_by_name_with_what_it_must_be(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is {re.escape(repr(value))}; it must be a (whole )?number"):
        SamplingSettings(**{field: value})


def test_numbers_of_numpy_are_numbers() -> None:
    settings = SamplingSettings(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint32(7))  # type: ignore[arg-type]  # beyond what the types promise
    plain = SamplingSettings(temperature=0.5, top_k=3, seed=7)
    assert [Sampler(settings).next(FIVE, []) for _ in range(9)] == [Sampler(plain).next(FIVE, []) for _ in range(9)]
