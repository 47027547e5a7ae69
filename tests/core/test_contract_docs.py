"""Every hook of the contract is told in the README as it is, and held by a test of the conformance suite."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import expertstream.hookspecs as hookspecs

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SUITE = sorted((ROOT / "core" / "expertstream" / "conformance").glob("test_*.py"))


def _is_marked(function: ast.FunctionDef, mark: str) -> bool:
    return any(mark in ast.unparse(decorator) for decorator in function.decorator_list)


SIGNATURES = {
    node.name: f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
    for node in ast.parse(Path(hookspecs.__file__).read_text()).body
    if isinstance(node, ast.FunctionDef) and node.returns and _is_marked(node, "hookspec")
}


def _hooks_of_tests(path: Path) -> dict[str, set[str]]:
    """The names in `@pytest.mark.hook(...)` of each test, on it or on its class, by the test's name."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text()).body:
        inherited = _marked_hooks(node.decorator_list) if isinstance(node, ast.ClassDef) else set()
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                found[f"{path.name}::{function.name}"] = inherited | _marked_hooks(function.decorator_list)
    return found


def _marked_hooks(decorators: list[ast.expr]) -> set[str]:
    return {
        argument.value
        for decorator in decorators
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.hook"
        for argument in decorator.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


HOOKS_OF_TESTS = {test: hooks for path in SUITE for test, hooks in _hooks_of_tests(path).items()}


def test_there_are_hooks_and_a_suite_to_look_at() -> None:
    assert set(SIGNATURES) > hookspecs.REQUIRED
    assert SIGNATURES["commit_slot"] == "commit_slot(store: SlotStore, staging: Staging) -> Commit"
    assert HOOKS_OF_TESTS


@pytest.mark.parametrize("hook", SIGNATURES)
def test_the_readme_gives_the_exact_signature_of_every_hook(hook: str) -> None:
    assert SIGNATURES[hook] in README.read_text(encoding="utf-8"), f"write `{SIGNATURES[hook]}` in README.md"


def test_the_readme_states_the_version_of_the_contract() -> None:
    stated = rf"^EXPERTSTREAM_CONTRACT = {hookspecs.CONTRACT_VERSION}\b"
    assert re.search(stated, README.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("hook", SIGNATURES)
def test_every_hook_is_held_by_a_test_of_the_suite(hook: str) -> None:
    assert any(hook in hooks for hooks in HOOKS_OF_TESTS.values()), f"no test is marked @pytest.mark.hook({hook!r})"


@pytest.mark.parametrize("test", HOOKS_OF_TESTS)
def test_every_test_of_the_suite_says_whose_promise_it_holds(test: str) -> None:
    assert HOOKS_OF_TESTS[test], f"{test} carries no @pytest.mark.hook(name)"
    assert HOOKS_OF_TESTS[test] <= set(SIGNATURES), f"{test} names a hook that there is not"


@pytest.mark.parametrize("hook", SIGNATURES)
def test_every_hook_says_in_its_docstring_whether_it_may_be_left_out(hook: str) -> None:
    promise = "Required." if hook in hookspecs.REQUIRED else "Optional"
    assert promise in (getattr(hookspecs, hook).__doc__ or "")
