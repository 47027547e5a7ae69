"""The bundled model through metal_compat: where slots live changes no token, whatever the budget."""

from __future__ import annotations

import pytest

from expertstream import BudgetTooSmall
from expertstream_engine import BUNDLED_MODEL, open_model

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
