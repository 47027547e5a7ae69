"""What a backend's distribution adds to the suite: packages of tests, and fixtures that only it can give.

They are found by entry points. One that could add nothing is refused before any test, in one line.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

GROUP = "expertstream.conformance"
FIXTURES = ("streams", "break_next_commit", "starve_staging")
"""What the suite asks a backend for; the defaults are in `expertstream.conformance.plugin`."""


def added_tests(config: pytest.Config, backend_name: str) -> list[Path]:
    """Take over the fixtures of all additions for a backend; the folders of their tests.

    Raises pytest.UsageError for an entry point that names no package, one that cannot be imported, and one with
    neither tests nor fixtures.
    """
    entries = sorted(metadata.entry_points(group=GROUP, name=backend_name), key=lambda entry: entry.value)
    return [folder for entry in entries for folder in _taken_over(config, entry)]


def _taken_over(config: pytest.Config, entry: metadata.EntryPoint) -> list[Path]:
    package = _imported(config, entry)
    if entry.attr or not hasattr(package, "__path__"):
        raise _refusal(
            entry, f"are no package: let the entry point name a folder with an __init__.py, not {entry.value!r}"
        )
    folders = [folder for folder in map(Path, package.__path__) if any(folder.rglob("test_*.py"))]
    if not folders and not any(hasattr(package, name) for name in FIXTURES):
        raise _refusal(
            entry,
            f"add nothing: there is no test_*.py in {', '.join(package.__path__)}, and its __init__.py has none of the"
            f" fixtures {', '.join(FIXTURES)}",
        )
    return folders


def _imported(config: pytest.Config, entry: metadata.EntryPoint) -> ModuleType:
    try:
        config.pluginmanager.import_plugin(entry.module)  # its asserts are rewritten, and its fixtures known
        return sys.modules[entry.module]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # a foreign module may raise anything at import, SystemExit too
        cause = error.__cause__ or error  # pytest says more in words of its own where a module is missing
        distribution = entry.dist.name if entry.dist else "its distribution"
        raise _refusal(
            entry, f"cannot be imported: {type(cause).__name__}: {cause}; repair or uninstall {distribution}"
        ) from None


def _refusal(entry: metadata.EntryPoint, why: str) -> pytest.UsageError:
    of = f" of {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    text = f"the additions of backend {entry.name!r} to the suite (entry point {entry.value!r}{of}) {why}"
    return pytest.UsageError(" ".join(text.split()))
