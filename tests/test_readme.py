"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from expertstream_engine import BUNDLED_MODEL

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_readmes_python_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block.replace("model.gguf", str(BUNDLED_MODEL)), "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out
