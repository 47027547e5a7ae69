"""What llama.cpp answers for the same files: tokens, logits and greedy continuations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import model_files
from expertstream_engine import BUNDLED_MODEL, Model, open_model
from expertstream_engine.architecture import FAMILIES

REFERENCE = model_files.DATA / "reference"


def cases_of(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((REFERENCE / f"{name}.json").read_text())["cases"]
    return cases


def assert_last_logits(logits: np.ndarray, case: dict[str, Any], within: float) -> None:
    np.testing.assert_allclose(logits[case["last_top_ids"]], case["last_top_logits"], rtol=0, atol=within)
    assert abs(float(logits.astype(np.float64).sum()) - case["last_logits_sum"]) < within * logits.size


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_files.write_dequantized(model_files.TINY_Q8_0, tmp_path_factory.mktemp("f32") / "tiny15m-f32.gguf")


def greedy(model: Model, tokens: list[int], count: int) -> list[int]:
    generation = model.generate(tokens, count, ignore_eos=True)
    for _ in generation:
        pass
    return generation.tokens


def test_an_exact_file_gives_the_same_tokens_and_logits(exact_model: Path) -> None:
    cases = cases_of("tiny15m-f32")
    assert len(cases) == 10
    with open_model(exact_model, expert_memory="25%") as model:
        for case in cases:
            assert_last_logits(model.logits(case["tokens"])[0], case, within=1e-3)
            tokens = greedy(model, case["tokens"], 64)
            assert len(tokens) == 64
            for place, (token, wanted) in enumerate(zip(tokens, case["greedy"], strict=True)):
                if token != wanted:  # a tie may go either way, and what follows is another text
                    assert case["greedy_gap"][place] < 1e-3, (case["text"], place)
                    break


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_each_architecture_gives_the_same_logits(architecture: str, tmp_path: Path) -> None:
    path = model_files.write_random(architecture, tmp_path / "random.gguf")
    with open_model(path, expert_memory="50%") as model:
        for case in cases_of(f"random-{architecture}-f32"):
            logits = model.logits(case["tokens"], all_positions=True)
            assert_last_logits(logits[-1], case, within=1e-3)
            assert logits.argmax(1).tolist() == case["argmax_each"]
            assert greedy(model, case["tokens"], 64)[:8] == case["greedy"][:8]


@pytest.mark.parametrize(("path", "name"), [(model_files.TINY_Q8_0, "tiny15m-q8_0"), (BUNDLED_MODEL, "tiny15m-q4_k_m")])
def test_a_quantized_file_agrees_wherever_the_answer_is_clear(path: Path, name: str) -> None:
    """Along the reference's own text: 98 % of positions, and all where its two best logits are 0.5 apart."""
    agreed = positions = 0
    with open_model(path, expert_memory="25%") as model:
        for case in cases_of(name):
            tokens = case["tokens"] + case["greedy"]
            logits = model.logits(tokens[:-1], all_positions=True)
            best = logits.argmax(1).tolist()
            prompt = len(case["tokens"])
            assert prompt == len(case["argmax_each"])
            wanted = case["argmax_each"][:-1] + case["greedy"]
            gaps = [0.0] * (prompt - 1) + case["greedy_gap"]
            for place, (token, right, gap) in enumerate(zip(best, wanted, gaps, strict=True)):
                assert token == right or gap <= 0.5, (case["text"], place)
            agreed += sum(token == right for token, right in zip(best, wanted, strict=True))
            positions += len(wanted)
    assert positions > 700
    assert agreed >= 0.98 * positions


@pytest.mark.parametrize("name", ["tiny15m-q8_0", "tiny15m-q4_k_m"])
def test_prompts_have_the_same_ids(name: str) -> None:
    with open_model() as model:
        assert model.tokenizer is not None
        for case in cases_of(name):
            assert model.tokenizer.encode(case["text"], add_bos=False) == case["tokens"]
            assert model.encode(case["text"]) == [model.tokenizer.bos_id, *case["tokens"]]  # as the file says
