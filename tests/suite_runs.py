"""Runs of the conformance suite in processes of their own, as a user starts them, over the backends of tests/broken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from attrs import frozen

TESTS = Path(__file__).parent
BROKEN = TESTS / "broken"
STRANGER = TESTS / "third_party" / "expertstream-fakedevice"
SOUND = ("sound_late", "sound_in_place")


@frozen
class SuiteRun:
    """How a run ended: `failed` are the names of tests that failed, without their parameters."""

    exit_code: int
    failed: frozenset[str]
    output: str


def broken_backends() -> list[str]:
    """The name of every backend in tests/broken that is not sound."""
    modules = (path.stem for path in (BROKEN / "expertstream_broken").glob("*.py"))
    return sorted(name for name in modules if name not in {"__init__", "sound", *SOUND})


def install_broken(site: Path) -> None:
    """Write into the empty folder `site` what pip would: the metadata that offers the backends of tests/broken."""
    names = [*SOUND, *broken_backends()]
    additions = {name: "in_place_additions" if "in_place" in name else "late_additions" for name in names}
    info = site / "expertstream_broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: expertstream-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "\n".join(
            [
                "[expertstream.backends]",
                *(f"{name} = expertstream_broken.{name}" for name in names),
                "[expertstream.conformance]",
                *(f"{name} = expertstream_broken.{module}" for name, module in additions.items()),
            ]
        )
    )


def run_suite(
    backend: str, *arguments: str, folder: Path, site: Path | None = None, is_plain: bool = False
) -> SuiteRun:
    """`pytest -p expertstream.conformance --backend NAME` from `folder`, with what is installed in `site`.

    A plain run starts in half the time: without rewritten assertions and without the plugins that happen to be here.
    """
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST_", "EXPERTSTREAM_"))}
    if site is not None:
        inherited = [environ["PYTHONPATH"]] if "PYTHONPATH" in environ else []
        environ["PYTHONPATH"] = os.pathsep.join([str(site), str(BROKEN), *inherited])
    if is_plain:
        environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        arguments = (*arguments, "--assert=plain")
    command = [sys.executable, "-m", "pytest", "-p", "expertstream.conformance", "--backend", backend]
    ended = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-rfE", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    output = ended.stdout + ended.stderr
    failed = re.findall(r"^(?:FAILED|ERROR) \S*::(test_\w+)", output, re.MULTILINE)
    return SuiteRun(ended.returncode, frozenset(failed), output)
