"""Lossless means bytes: neither budget, policy, threads nor the way of reading changes a bit of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import model_files
from expertstream import BudgetTooSmall
from expertstream_engine import BUNDLED_MODEL, open_model

PROMPTS = [np.random.default_rng(length).integers(1, 4096, length).tolist() for length in (1, 24, 300)]
"""Token ids of 1, 24 and 300 positions."""

Answer = list[tuple[bytes, bytes, tuple[int, ...]]]


def answer(path: Path, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> Answer:
    """For each prompt the bytes of all its logits, of the last ones alone, and 24 greedy tokens."""
    answers = []
    with open_model(path, **options) as model:
        for prompt in prompts:
            generation = model.generate(prompt, 24, ignore_eos=True)
            for _ in generation:
                pass
            everywhere = model.logits(prompt, all_positions=True)
            answers.append((everywhere.tobytes(), model.logits(prompt).tobytes(), tuple(generation.tokens)))
    return answers


@pytest.fixture(scope="module")
def resident() -> Answer:
    return answer(BUNDLED_MODEL, expert_memory="all")


@pytest.fixture(scope="module")
def smallest_bytes() -> int:
    with pytest.raises(BudgetTooSmall) as refusal:
        open_model(BUNDLED_MODEL, expert_memory="1")
    return refusal.value.smallest_bytes


@pytest.mark.parametrize("policy", ["hotness", "lru"])
@pytest.mark.parametrize("budget", ["all", "50%", "25%", "smallest"])
def test_budget_and_policy_change_no_bit(resident: Answer, smallest_bytes: int, budget: str, policy: str) -> None:
    memory = str(smallest_bytes) if budget == "smallest" else budget
    assert answer(BUNDLED_MODEL, expert_memory=memory, policy=policy) == resident


@pytest.mark.parametrize("filler_threads", [1, 8])
@pytest.mark.parametrize("io_mode", ["direct", "buffered"])
def test_the_way_of_reading_changes_no_bit(
    resident: Answer, smallest_bytes: int, filler_threads: int, io_mode: str
) -> None:
    options = {"filler_threads": filler_threads, "io_mode": io_mode, "expert_memory": str(smallest_bytes)}
    assert answer(BUNDLED_MODEL, **options) == resident


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_computing_threads_changes_no_bit(resident: Answer, threads: int) -> None:
    assert answer(BUNDLED_MODEL, expert_memory="25%", threads=threads) == resident


def test_one_byte_less_than_the_smallest_budget_is_refused(smallest_bytes: int) -> None:
    with pytest.raises(BudgetTooSmall, match=str(smallest_bytes)):
        open_model(BUNDLED_MODEL, expert_memory=str(smallest_bytes - 1))


def test_prefill_reads_each_expert_at_most_once_a_layer_and_is_counted_apart(smallest_bytes: int) -> None:
    with open_model(BUNDLED_MODEL, expert_memory=str(smallest_bytes)) as model:
        generation = model.generate(PROMPTS[2], 4, ignore_eos=True)
        for _ in generation:
            pass
        report = generation.report
        layers, experts = 4, 16
        assert report.prefill.steps == layers
        assert report.prefill.exhausted == layers
        assert report.prefill.misses <= layers * experts
        assert report.decode.steps == 3 * layers
        assert report.decode.exhausted == 0
        assert report.decode.hits + report.decode.misses == 3 * layers * 2


def test_an_unquantized_model_streams_like_any_other(tmp_path: Path) -> None:
    path = model_files.write_random("olmoe", tmp_path / "random.gguf")
    prompts = [[token % 300 for token in prompt] for prompt in PROMPTS]
    everything = answer(path, prompts, expert_memory="all")
    assert answer(path, prompts, expert_memory="30%", policy="lru", filler_threads=2) == everything
