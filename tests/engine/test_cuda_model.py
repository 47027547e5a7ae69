"""Whole models on a CUDA device: the CPU's tokens, and the same bits whatever the slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import model_files
from expertstream import BackendOption, BudgetTooSmall
from expertstream_engine import BUNDLED_MODEL, open_model
from expertstream_engine.architecture import FAMILIES
from gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

DISCRETE: dict[str, Any] = {"backend": "cuda_discrete"}
MAPPED: dict[str, Any] = {"backend": "cuda_unified", "backends": (BackendOption("cuda_unified", "mapped", True),)}
BACKENDS = {"discrete": DISCRETE, "mapped": MAPPED}
PROMPTS = [np.random.default_rng(length).integers(1, 4096, length).tolist() for length in (1, 24, 300)]
CLEAR = 1e-3  # between the two best logits

Answer = list[tuple[bytes, bytes, tuple[int, ...]]]


def answer(path: Path, **options: Any) -> Answer:
    """For each prompt the bytes of all its logits, of the last ones alone, and 24 greedy tokens."""
    answers = []
    with open_model(path, **options) as model:
        for prompt in PROMPTS:
            generation = model.generate(prompt, 24, ignore_eos=True)
            for _ in generation:
                pass
            everywhere = model.logits(prompt, all_positions=True)
            answers.append((everywhere.tobytes(), model.logits(prompt).tobytes(), tuple(generation.tokens)))
    return answers


@pytest.fixture(scope="module")
def resident() -> Answer:
    return answer(BUNDLED_MODEL, expert_memory="all", **DISCRETE)


@pytest.fixture(scope="module")
def smallest_bytes() -> int:
    with pytest.raises(BudgetTooSmall) as refusal:
        open_model(BUNDLED_MODEL, expert_memory="1", **DISCRETE)
    return refusal.value.smallest_bytes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget", ["all", "50%", "25%", "smallest"])
def test_budget_and_backend_change_no_bit(resident: Answer, smallest_bytes: int, budget: str, backend: str) -> None:
    memory = str(smallest_bytes) if budget == "smallest" else budget
    assert answer(BUNDLED_MODEL, expert_memory=memory, **BACKENDS[backend]) == resident


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_files.write_dequantized(model_files.TINY_Q8_0, tmp_path_factory.mktemp("f32") / "tiny15m-f32.gguf")


@pytest.fixture(scope="module")
def cpu_texts(exact_model: Path) -> list[tuple[list[int], int, np.ndarray]]:
    """For each prompt the CPU's greedy text with it, the prompt's length, and the logits at every position."""
    texts = []
    with open_model(exact_model, expert_memory="all", backend="cpu") as model:
        for prompt in PROMPTS:
            generation = model.generate(prompt, 64, ignore_eos=True)
            for _ in generation:
                pass
            text = [*prompt, *generation.tokens]
            texts.append((text, len(prompt), model.logits(text[:-1], all_positions=True)))
    return texts


@pytest.mark.parametrize("budget", ["all", "25%"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exact_file_gives_the_cpus_tokens(
    exact_model: Path, cpu_texts: list[tuple[list[int], int, np.ndarray]], budget: str, backend: str
) -> None:
    with open_model(exact_model, expert_memory=budget, **BACKENDS[backend]) as model:
        for text, prompt_length, expected in cpu_texts:
            logits = model.logits(text[:-1], all_positions=True)
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
            best_two = np.sort(expected, axis=1)[:, -2:]
            clear = best_two[:, 1] - best_two[:, 0] >= CLEAR
            np.testing.assert_array_equal(logits.argmax(1)[clear], expected.argmax(1)[clear])
            generation = model.generate(text[:prompt_length], 64, ignore_eos=True)
            for _ in generation:
                pass
            until = prompt_length - 1 + next(iter(np.flatnonzero(~clear[prompt_length - 1 :]).tolist()), 64)
            assert generation.tokens[: until + 1 - prompt_length] == text[prompt_length : until + 1]


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_each_architecture_gives_the_cpus_logits(architecture: str, tmp_path: Path) -> None:
    path = model_files.write_random(architecture, tmp_path / "random.gguf")
    tokens = np.random.default_rng(5).integers(1, 300, 40).tolist()
    with open_model(path, expert_memory="50%", backend="cpu") as model:
        expected = model.logits(tokens, all_positions=True)
    with open_model(path, expert_memory="50%", **DISCRETE) as model:
        np.testing.assert_allclose(model.logits(tokens, all_positions=True), expected, rtol=0, atol=1e-3)


def test_memory_does_not_grow_over_many_tokens() -> None:
    with open_model(BUNDLED_MODEL, expert_memory="25%", **DISCRETE) as model:
        held = []
        for _ in range(4):
            generation = model.generate([1], 500, ignore_eos=True)
            for _ in generation:
                pass
            held.append(model._decoder._ops.held_bytes)  # type: ignore[attr-defined]  # CupyOps alone has it
    assert held[1:] == held[:1] * 3
