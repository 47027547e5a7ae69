"""The stranger's backend is what the README shows: one page, public names only, and the very text that runs here."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import expertstream
from suite_runs import STRANGER

PAGE = STRANGER / "expertstream_fakedevice" / "__init__.py"
README = Path(__file__).parents[2] / "README.md"


def test_a_complete_backend_is_at_most_a_hundred_lines() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 100


def test_it_uses_public_names_only() -> None:
    nodes = list(ast.walk(ast.parse(PAGE.read_text(encoding="utf-8"))))
    plain = {alias.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    sources = {node.module: node for node in nodes if isinstance(node, ast.ImportFrom)}
    names = {alias.name for alias in sources.pop("expertstream").names}
    assert names <= set(expertstream.__all__)
    assert plain | {str(module).partition(".")[0] for module in sources} <= {"numpy", *sys.stdlib_module_names}


def test_the_readme_shows_the_text_that_runs() -> None:
    assert PAGE.read_text(encoding="utf-8") in README.read_text(encoding="utf-8"), f"put {PAGE} into README.md"


def test_the_readme_shows_the_project_file_that_is_installed() -> None:
    """But for the entry point of its own additions to the suite, which the page tells of later."""
    project = (STRANGER / "pyproject.toml").read_text(encoding="utf-8")
    shown = project[: project.index('\n[project.entry-points."expertstream.conformance"]')]
    assert f"```toml\n{shown}```\n" in README.read_text(encoding="utf-8"), "put it into README.md"
