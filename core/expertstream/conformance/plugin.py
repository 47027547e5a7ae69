"""The pytest side of the suite: options, the backend under test, fixtures, and a limit for what never returns.

It owns which files are collected and refuses, before any test, a backend that cannot be tested.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib import metadata
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
from expertstream.conformance.limits import Unfinished, within
from expertstream.conformance.slots_under_test import SlotsUnderTest

ADDITIONS_GROUP = "expertstream.conformance"

OpenSlots = Callable[[SlotLayout, int], SlotsUnderTest]
LaunchRead = Callable[[SlotStore, int, int, int], Callable[[], bytes]]
BreakNextCommit = Callable[[SlotStore], None]

_SUITE = Path(__file__).parent
_BACKEND = pytest.StashKey[Backend]()
_HEADER = pytest.StashKey[str]()
_UNFINISHED = pytest.StashKey[list[str]]()
_EXIT_STATUS = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> Backend:
    """The backend under test."""
    return pytestconfig.stash[_BACKEND]


@pytest.fixture
def open_slots(backend: Backend, pytestconfig: pytest.Config) -> Iterator[OpenSlots]:
    """Call it with a layout and a count for a store; all of them are closed after the test."""
    stores: list[SlotStore] = []

    def open_one(layout: SlotLayout, slot_count: int) -> SlotsUnderTest:
        store = backend.alloc_slot_store(layout, slot_count)
        stores.append(store)
        return SlotsUnderTest(backend, store)

    yield open_one
    for store in stores:
        _limited(pytestconfig, "close", store.close)


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


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Where the suite itself is run, a conftest.py of the folder it is run from has no say in it."""
    if not early_config.known_args_namespace.file_or_dir:
        early_config.known_args_namespace.noconftest = True


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hook(name): the hook of the contract whose promise the test holds")
    config.stash[_UNFINISHED] = []
    if config.getoption("help") or config.getoption("version"):
        return
    name = config.getoption("--backend")
    if name is None:
        raise pytest.UsageError(f"say which backend: --backend NAME; installed: {', '.join(installed_backends())}")
    try:
        backend = open_backend(name, options=_options(name, config.getoption("--backend-option")))
        config.stash[_HEADER] = _described(backend)
        additions = [path for entry in _additions(name) for path in _added_tests(config, entry)]
    except Exception as error:  # noqa: BLE001  # foreign code may raise anything; there is no backend to test then
        kind = "" if isinstance(error, ExpertstreamError) else f"backend {name!r}: {type(error).__name__}: "
        raise pytest.UsageError(" ".join(f"{kind}{error}".split())) from None
    config.stash[_BACKEND] = backend
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(path) for path in (*sorted(_SUITE.glob("test_*.py")), *additions)]


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


def _additions(name: str) -> list[metadata.EntryPoint]:
    return sorted(metadata.entry_points(group=ADDITIONS_GROUP, name=name), key=lambda entry: entry.value)


def _added_tests(config: pytest.Config, entry: metadata.EntryPoint) -> list[Path]:
    """Take the fixtures of an addition over, and its test files, which lie beside its `__init__.py`."""
    config.pluginmanager.import_plugin(entry.module)
    package = importlib.import_module(entry.module)
    return sorted(path for folder in package.__path__ for path in Path(folder).glob("test_*.py"))
