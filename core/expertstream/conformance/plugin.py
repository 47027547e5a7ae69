"""The pytest side of the suite: options, the backend under test, fixtures, and a limit for what never returns.

It owns which files are collected, refuses before any test a backend that cannot be tested, and leaves nothing behind
in the folder that it is run from.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from expertstream import (
    Backend,
    BackendOption,
    ExpertstreamError,
    SlotLayout,
    SlotStore,
    StreamSettings,
    format_bytes,
    installed_backends,
    load_settings,
    open_backend,
)
from expertstream.conformance.additions import added_tests
from expertstream.conformance.slots_under_test import HostSlotsUnderTest, SlotsUnderTest
from expertstream.limits import Unfinished, within

OpenSlots = Callable[[SlotLayout, int], SlotsUnderTest]
OpenTier = Callable[[SlotLayout, int, int], HostSlotsUnderTest]
LaunchRead = Callable[[SlotStore, int, int, int], Callable[[], bytes]]
BreakNextCommit = Callable[[SlotStore], None]
StarveStaging = Callable[[SlotLayout, int], None]

LARGE_STORE_BYTES = 1 << 20
"""A device that cannot hold smaller stores is none to test with."""

_SUITE = Path(__file__).parent
_CACHE_OPTIONS = ("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "cacheshow", "cacheclear")
_BACKEND = pytest.StashKey[Backend]()
_HEADER = pytest.StashKey[str]()
_UNFINISHED = pytest.StashKey[list[str]]()
_EXIT_STATUS = pytest.StashKey[int]()
_RANDOM_SEED = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> Backend:
    """The backend under test."""
    return pytestconfig.stash[_BACKEND]


@pytest.fixture
def open_slots(backend: Backend, pytestconfig: pytest.Config) -> Iterator[OpenSlots]:
    """Call it with a layout and a count for a store; all of them are closed after the test.

    Skips where the device has no room for a large one.
    """
    stores: list[SlotStore] = []

    def open_one(layout: SlotLayout, slot_count: int) -> SlotsUnderTest:
        need_room(backend, layout, slot_count)
        store = backend.alloc_slot_store(layout, slot_count)
        stores.append(store)
        return SlotsUnderTest(backend, store)

    yield open_one
    for store in stores:
        _limited(pytestconfig, "close", store.close)


@pytest.fixture
def open_tier(backend: Backend, open_slots: OpenSlots) -> OpenTier:
    """Call it with a layout, a number of slots and one of host slots, for these; skips where there is no host tier."""
    if "alloc_host_slots" not in backend.implemented:
        pytest.skip(f"backend {backend.name!r} offers no alloc_host_slots, so it has no host tier")
    if not backend.has_host_tier:
        pytest.skip(f"backend {backend.name!r} has slots in host memory, so it has no host tier")
    return lambda layout, slot_count, host_slot_count: open_slots(layout, slot_count).host_slots(host_slot_count)


@pytest.fixture
def streams() -> Sequence[int]:
    """Streams that run beside each other. A backend's additions override this to name more than the first one."""
    return (0,)


@pytest.fixture
def launch_read(backend: Backend) -> LaunchRead:
    """The backend's hook of this name; skips where it has none."""
    if "launch_read" not in backend.implemented:
        pytest.skip(f"backend {backend.name!r} offers no launch_read, so no kernel can read while commits run")

    def launch(store: SlotStore, slot: int, stream: int, after_ms: int) -> Callable[[], bytes]:
        read = backend.launch_read(store, slot, stream, after_ms)
        assert read is not None, "the backend has the hook"
        return read

    return launch


@pytest.fixture
def break_next_commit(backend: Backend) -> BreakNextCommit:
    """Makes the next commit of a store fail, early or late. Only a backend's own additions know how."""
    pytest.skip(f"the additions of backend {backend.name!r} have no fixture break_next_commit, so no commit can fail")


@pytest.fixture
def starve_staging(backend: Backend) -> StarveStaging:
    """Refuses, until the test ends, staging memory for more than a number of buffers of a slot of a layout at once.

    Called with both before a store is asked for. Host slots count as buffers. Only a backend's own additions know how.
    """
    pytest.skip(f"the additions of backend {backend.name!r} have no fixture starve_staging, so it cannot be scarce")


@pytest.fixture
def random_seed(pytestconfig: pytest.Config) -> int:
    """What a test draws its random choices from; where it fails, the report says how to repeat them."""
    return pytestconfig.stash[_RANDOM_SEED]


def need_room(backend: Backend, layout: SlotLayout, slot_count: int) -> None:
    """Skip a test that needs a store of several MiB where the backend grants fewer slots than that."""
    if slot_count * layout.slot_bytes < LARGE_STORE_BYTES:
        return
    budget = backend.budget_for_expert_size(layout.slot_bytes, 0, slot_count)
    if budget.slots < slot_count:
        pytest.skip(
            f"backend {backend.name!r} grants {budget.slots} of the {slot_count} slots of {layout.slot_bytes} bytes"
            f" that this test needs: {budget.reason}"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("expertstream", "conformance of expertstream backends")
    group.addoption("--backend", metavar="NAME", help="the installed backend to hold to the contract")
    group.addoption(
        "--backend-option",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="an option of the backend, as `expertstream run` takes it; may be given several times",
    )
    group.addoption(
        "--test-limit-s",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="a test that runs longer fails, because a call into the backend has not returned (default: 60)",
    )
    group.addoption(
        "--random-seed",
        type=int,
        metavar="SEED",
        help="repeat the random choices of an earlier run: the number that it gave where a test failed",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Where the suite itself is run, a conftest.py of the folder has no say in it, and no cache is left there.

    Who asks for something of the cache gets one.
    """
    options = early_config.known_args_namespace
    if options.file_or_dir:
        return
    options.noconftest = True
    if not any(getattr(options, name, False) for name in _CACHE_OPTIONS):
        for name in ("cacheprovider", "stepwise"):  # as -p no:cacheprovider does, for which it is too late here
            if early_config.pluginmanager.has_plugin(name):
                early_config.pluginmanager.unregister(name=name)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hook(name): the hook of the contract whose promise the test holds")
    config.stash[_UNFINISHED] = []
    seed = config.getoption("--random-seed")
    config.stash[_RANDOM_SEED] = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    if config.getoption("help") or config.getoption("version"):
        return
    name = config.getoption("--backend")
    if name is None:
        raise pytest.UsageError(f"say which backend: --backend NAME; installed: {', '.join(installed_backends())}")
    try:
        backend = open_backend(name, options=_options(name, config.getoption("--backend-option")))
        config.stash[_HEADER] = _described(backend)
    except Exception as error:  # noqa: BLE001  # foreign code may raise anything; there is no backend to test then
        kind = "" if isinstance(error, ExpertstreamError) else f"backend {name!r}: {type(error).__name__}: "
        raise pytest.UsageError(" ".join(f"{kind}{error}".split())) from None
    config.stash[_BACKEND] = backend
    folders = (_SUITE, *added_tests(config, name))
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(folder) for folder in folders]  # a folder's tests go by their file's name, a file's by none
        for name, pattern in (("python_files", "test_*.py"), ("python_functions", "test_*")):
            config.addinivalue_line(name, pattern)  # also where a settings file there calls tests otherwise


def pytest_report_header(config: pytest.Config) -> str:
    return config.stash[_HEADER]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    config, test = pyfuncitem.config, pyfuncitem.obj
    if config.getoption("usepdb"):
        return (yield)

    @functools.wraps(test)
    def limited(**arguments: Any) -> Any:
        return _limited(config, pyfuncitem.name, functools.partial(test, **arguments))

    pyfuncitem.obj = limited
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "random_seed" in getattr(item, "fixturenames", ()):
        report.sections.append(("to repeat its random choices", f"--random-seed {item.config.stash[_RANDOM_SEED]}"))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What could not be tried, a line for each reason: with -rs pytest has one for each test."""
    reports = terminalreporter.stats.get("skipped", [])
    for reason, count in Counter(report.longrepr[2] for report in reports).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_EXIT_STATUS] = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if config.stash.get(_UNFINISHED, []):  # the interpreter would wait for the backend's threads, and these never end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_EXIT_STATUS])


def _limited(config: pytest.Config, what: str, call: Callable[[], Any]) -> Any:
    try:
        return within(config.getoption("--test-limit-s"), call)
    except Unfinished as error:
        config.stash[_UNFINISHED].append(what)
        pytest.fail(f"{what}: {error}", pytrace=False)


def _options(name: str, texts: list[str]) -> Sequence[BackendOption]:
    """The options that the command line and the environment have for a backend, as for a run."""
    environ = {key: text for key, text in os.environ.items() if key.startswith("EXPERTSTREAM_BACKENDS__")}
    overrides = {"backend": name, "backends": texts}
    return load_settings(StreamSettings, file=None, environ=environ, overrides=overrides).backends


def _described(backend: Backend) -> str:
    """The header line."""
    addressable = backend.host_memory_is_device_addressable()
    device = backend.describe_device()
    offer = backend.offer
    memory = "" if device.memory_bytes is None else f" with {format_bytes(device.memory_bytes)}"
    return (
        f"expertstream backend: {backend.name} of {offer.distribution} {offer.version}, device: {device.name}{memory}, "
        f"host memory is {'' if addressable else 'not '}device addressable"
    )
