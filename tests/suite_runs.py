"""Runs of the conformance suite over the backends of tests/broken, each in a process of its own.

From the command line as a user starts them, or forked from a server, which spares each the start and the imports.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import field, frozen

TESTS = Path(__file__).parent
BROKEN = TESTS / "broken"
STRANGER = TESTS / "third_party" / "expertstream-fakedevice"
LIMIT_S = 280
SOUND = ("sound_late", "sound_in_place", "sound_on_a_small_device", "sound_tiered", "sound_tiered_both_ways")


@frozen
class SuiteRun:
    """How a run ended: `failed` are the names of tests that failed, without their parameters."""

    exit_code: int
    output: str
    failed: frozenset[str] = field(init=False)

    @failed.default
    def _failed_tests(self) -> frozenset[str]:
        return frozenset(re.findall(r"^(?:FAILED|ERROR) \S*::(test_\w+)", self.output, re.MULTILINE))


def broken_backends() -> list[str]:
    """The name of every backend in tests/broken that is not sound."""
    modules = (path.stem for path in (BROKEN / "expertstream_broken").glob("*.py"))
    return sorted(name for name in modules if name not in {"__init__", "sound", *SOUND})


def install(site: Path, distribution: str, backends: dict[str, str], additions: dict[str, str]) -> None:
    """Write into the folder `site` what pip would: metadata that offers these modules by these names."""
    info = site / f"{distribution.replace('-', '_')}-2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(
        "\n".join(
            [
                "[expertstream.backends]",
                *(f"{name} = {module}" for name, module in backends.items()),
                "[expertstream.conformance]",
                *(f"{name} = {module}" for name, module in additions.items()),
            ]
        )
    )


def install_broken(site: Path) -> None:
    """Install the backends of tests/broken, with the additions to the suite that suit them."""
    names = [*SOUND, *broken_backends()]
    install(
        site,
        "expertstream-broken",
        {name: f"expertstream_broken.{name}" for name in names},
        {name: f"expertstream_broken.{_suiting(name)}_additions" for name in names},
    )


def _suiting(backend: str) -> str:
    return "in_place" if "in_place" in backend else "tiered" if "tier" in backend else "late"


def run_suite(backend: str, *arguments: str, folder: Path, site: Path | None = None) -> SuiteRun:
    """`pytest -p expertstream.conformance --backend NAME` from `folder`, with what is installed in `site`."""
    environ = _environ()
    if site is not None:
        inherited = [environ["PYTHONPATH"]] if "PYTHONPATH" in environ else []
        environ["PYTHONPATH"] = os.pathsep.join([str(site), str(BROKEN), *inherited])
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *_arguments(backend, arguments)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return SuiteRun(ended.returncode, ended.stdout + ended.stderr)


class SuiteServers:
    """Servers that run the suite in forked children, at most so many at once; any thread may call `run`."""

    def __init__(self, servers: queue.Queue[subprocess.Popen[str]], site: Path) -> None:
        self._idle = servers
        self._site = site

    def run(self, backend: str, *arguments: str, folder: Path) -> SuiteRun:
        """As `run_suite`, but without the plugins that happen to be here, and with plain assertions.

        Modules that the server has imported already could not have their assertions rewritten.
        """
        server = self._idle.get()
        try:
            with tempfile.NamedTemporaryFile("r", errors="replace") as output:
                exit_code = self._ask(
                    server,
                    arguments=[*_arguments(backend, arguments), "--assert=plain"],
                    folder=str(folder),
                    environ=_environ() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                    path=[str(self._site), str(BROKEN)],
                    output=output.name,
                    limit_s=LIMIT_S,
                )
                return SuiteRun(exit_code, output.read())
        finally:
            self._idle.put(server)

    def _ask(self, server: subprocess.Popen[str], **request: object) -> int:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"the server of suite runs has ended with exit code {server.wait()}"
        return int(answer)


@contextmanager
def suite_servers(count: int, site: Path) -> Iterator[SuiteServers]:
    """That many servers, over what is installed in `site`; a run under way is waited for in the end."""
    one_thread = {"OPENBLAS_NUM_THREADS": "1"}  # else importing numpy starts more, and a fork has but one
    command = [sys.executable, "-P", str(TESTS / "suite_server.py")]
    servers = [
        subprocess.Popen(command, env=_environ() | one_thread, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    idle: queue.Queue[subprocess.Popen[str]] = queue.Queue()
    for server in servers:
        idle.put(server)
    try:
        yield SuiteServers(idle, site)
    finally:
        for server in servers:
            with server:  # closes its input, which ends it
                pass


def _arguments(backend: str, arguments: tuple[str, ...]) -> list[str]:
    return ["-p", "expertstream.conformance", "--backend", backend, *arguments]


def _environ() -> dict[str, str]:
    """Without what other tests' settings could have to say in a run."""
    return {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST_", "EXPERTSTREAM_"))}
