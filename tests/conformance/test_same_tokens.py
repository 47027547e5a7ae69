"""A stranger's backend is selected by configuration and gives the tokens that cpu gives, at every budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertstream import BudgetTooSmall
from expertstream_engine import open_model

PROMPT = list(range(100, 140))


def tokens(config: Path, expert_memory: str) -> list[int]:
    with open_model(config=config, expert_memory=expert_memory) as model:
        generation = model.generate(PROMPT, 16, ignore_eos=True)
        for _ in generation:
            pass
        assert generation.report.backend == config.stem
        return generation.tokens


def config_for(backend: str, folder: Path) -> Path:
    path = folder / f"{backend}.toml"
    path.write_text(f'backend = "{backend}"\n')
    return path


@pytest.fixture(scope="module")
def cpu_tokens(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    return tokens(config_for("cpu", tmp_path_factory.mktemp("cpu")), "all")


@pytest.mark.parametrize("expert_memory", ["all", "50%", "25%", "smallest"])
def test_the_strangers_backend_gives_the_same_tokens(cpu_tokens: list[int], tmp_path: Path, expert_memory: str) -> None:
    config = config_for("fakedevice", tmp_path)
    if expert_memory == "smallest":
        with pytest.raises(BudgetTooSmall) as refusal:
            open_model(config=config, expert_memory="1")
        expert_memory = str(refusal.value.smallest_bytes)
    assert tokens(config, expert_memory) == cpu_tokens
