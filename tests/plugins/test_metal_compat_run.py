"""The bundled model through metal_compat: where slots live changes no token, whatever the budget."""

from __future__ import annotations

import json
import re

import pytest

from expertstream import BudgetTooSmall
from expertstream_engine import BUNDLED_MODEL, open_model
from lock_limits import run_limited

PROMPT = "In the beginning God created"


def tokens(backend: str, expert_memory: str) -> tuple[int, ...]:
    with open_model(BUNDLED_MODEL, backend=backend, expert_memory=expert_memory) as model:
        generation = model.generate(PROMPT, 32, ignore_eos=True)
        for _ in generation:
            pass
        assert generation.report.backend == backend
        return generation.report.tokens


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    return tokens("cpu", "all")


@pytest.mark.parametrize("budget", ["all", "50%", "25%", "smallest"])
def test_the_tokens_are_those_of_cpu_at_every_budget(expected: tuple[int, ...], budget: str) -> None:
    if budget == "smallest":
        with pytest.raises(BudgetTooSmall) as refusal:
            open_model(BUNDLED_MODEL, backend="metal_compat", expert_memory="1")
        budget = str(refusal.value.smallest_bytes)
    assert tokens("metal_compat", budget) == tokens("cpu", budget) == expected


RUN = "from expertstream_engine.cli import main; main()"
REQUIRED = ("--backend", "metal_compat", "--backend-option", "metal_compat.wire=require")


def test_a_run_whose_size_was_not_asked_for_goes_on_with_what_could_be_wired(expected: tuple[int, ...]) -> None:
    result = run_limited(1 << 20, RUN, "run", "--json", *REQUIRED, "-p", PROMPT, "-n", "32", "--ignore-eos")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert tuple(report["tokens"]) == expected
    assert 0 < report["expert_memory_bytes"] <= report["pinned_bytes"] <= 1 << 20
    assert re.search(r"of 32 slots of \d+ bytes could be wired, beside ", result.stderr)
    assert "the limit on locked memory (ulimit -l) is 1048576 bytes" in result.stderr


def test_a_run_of_a_size_that_cannot_be_wired_is_refused_with_the_numbers() -> None:
    result = run_limited(1 << 20, RUN, "run", *REQUIRED, "-p", PROMPT, "-n", "1", "--expert-memory", "50%")
    assert result.returncode == 2
    assert re.search(r"slots of \d+ bytes could be wired, beside 286720 bytes of other slots: ", result.stderr)
    assert "the limit on locked memory (ulimit -l) is 1048576 bytes" in result.stderr
    assert 'set wire = "try"' in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_goes_on_where_wiring_fails_partway_and_says_what_was_not_wired(expected: tuple[int, ...]) -> None:
    result = run_limited(
        1 << 20, RUN, "run", "--json", "--backend", "metal_compat", "-p", PROMPT, "-n", "32", "--ignore-eos"
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert tuple(report["tokens"]) == expected
    assert 0 < report["pinned_bytes"] <= 1 << 20 < report["expert_memory_bytes"]
    assert result.stderr.count("slots_wired_in_part") == 2
    assert re.search(r"unwired_bytes=[1-9]", result.stderr)


def test_budgets_keep_the_contract_where_little_may_be_locked() -> None:
    arguments = ["-p", "expertstream.conformance", *REQUIRED, "-k", "test_budgets"]
    result = run_limited(8 << 20, f"import sys, pytest; sys.exit(pytest.main({arguments}))")
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout
    assert "failed" not in result.stdout
