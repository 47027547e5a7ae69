"""The log goes where the application wants it, and the log hooks change nothing."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
import structlog
from structlog.testing import CapturingLogger

from expertstream import default_hooks, hookspecs
from expertstream.errors import BackendUnavailable, CommitFailed, DeviceOutOfMemory
from expertstream.hookspecs import hookimpl
from expertstream.log import get_log
from expertstream.observers import LogHooks
from expertstream.slots import READY, Commit, SlotBudget, SlotLayout, SlotPart, Staging

LAYOUT = SlotLayout((SlotPart("gate", 0, 8192), SlotPart("down", 8192, 4096)))


@pytest.fixture(autouse=True)
def structlog_as_imported() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def test_an_unconfigured_library_warns_on_stderr_and_writes_nothing_to_stdout() -> None:
    program = (
        "from expertstream.log import get_log\n"
        "get_log().info('slots_granted', slot_count=3)\n"
        "get_log().warning('short_read', path='a b', wanted_bytes=7)\n"
        "get_log().error('100 %d')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == ""
    assert run.stderr == "short_read path='a b' wanted_bytes=7\n100 %d\n"


def test_without_structlog_configured_records_reach_the_standard_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="expertstream"):
        get_log().info("slots_granted", slot_count=3, reason="100 % of it")
        get_log().debug("below_the_level")
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("expertstream", "INFO", "slots_granted slot_count=3 reason='100 % of it'")
    ]


def test_an_error_logged_with_its_traceback_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    try:
        int("telling")
    except ValueError:
        get_log().exception("read_failed", path="x")
    assert caplog.records[0].getMessage() == "read_failed path='x'"
    assert "ValueError: invalid literal" in caplog.text


def test_structlog_as_the_application_configured_it_is_used_even_if_configured_late() -> None:
    get_log().debug("before")
    capturing = CapturingLogger()
    structlog.configure(processors=[], logger_factory=lambda *_names: capturing)
    get_log().info("slots_granted", slot_count=3)
    assert [(call.method_name, call.kwargs) for call in capturing.calls] == [
        ("info", {"event": "slots_granted", "slot_count": 3})
    ]


class Backend:
    """Answers as told; an answer that is an exception is raised."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def _give(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @hookimpl
    def budget_for_expert_size(self, asked: int | None) -> SlotBudget:
        return self._give()  # type: ignore[no-any-return]  # the test knows

    @hookimpl
    def alloc_slot_store(self) -> object:
        return self._give()

    @hookimpl
    def commit_slot(self) -> Commit:
        return self._give()  # type: ignore[no-any-return]  # the test knows


def hooks_over(answer: object) -> Any:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for plugin in (default_hooks, Backend(answer), LogHooks()):
        manager.register(plugin)
    manager.check_pending()
    return manager.hook


def call_budget(hooks: Any) -> object:
    return hooks.budget_for_expert_size(expert_bytes=12288, resident_bytes=5, asked=9, other_slots_bytes=3)


def call_alloc(hooks: Any) -> object:
    return hooks.alloc_slot_store(layout=LAYOUT, slot_count=4)


def call_commit(hooks: Any) -> object:
    return hooks.commit_slot(store=None, staging=Staging(6, memoryview(b"")))


@pytest.mark.parametrize(
    ("call", "answer", "event"),
    [
        (
            call_budget,
            SlotBudget(7, "seven fit", staging_bytes=99),
            {
                "event": "slots_granted",
                "slot_bytes": 12288,
                "beside_bytes": 5,
                "other_slots_bytes": 3,
                "asked_slots": 9,
                "slot_count": 7,
                "staging_bytes": 99,
                "reason": "seven fit",
            },
        ),
        (
            call_alloc,
            SimpleNamespace(),
            {"event": "slot_store_allocated", "slot_bytes": 12288, "slot_count": 4, "total_bytes": 49152},
        ),
        (call_commit, READY, None),
    ],
)
def test_an_answer_passes_unchanged_and_is_logged_unless_it_is_a_commit(
    call: Any, answer: object, event: dict[str, object] | None
) -> None:
    with structlog.testing.capture_logs() as events:
        assert call(hooks_over(answer)) is answer
    assert events == ([{**event, "log_level": "info"}] if event else [])


@pytest.mark.parametrize(
    ("call", "error", "event", "level"),
    [
        (call_budget, BackendUnavailable("no driver"), "budget_failed", "info"),
        (call_alloc, DeviceOutOfMemory("49152 bytes asked for, 3 free"), "slot_store_failed", "info"),
        (call_commit, CommitFailed("the copy failed"), "commit_failed", "warning"),
        (call_commit, RuntimeError("a bug of the backend"), "commit_failed", "warning"),
    ],
)
def test_a_failure_is_logged_with_its_error_and_raised_unchanged(
    call: Any, error: Exception, event: str, level: str
) -> None:
    with structlog.testing.capture_logs() as events, pytest.raises(type(error)) as raised:
        call(hooks_over(error))
    assert raised.value is error
    assert [(logged["event"], logged["log_level"]) for logged in events] == [(event, level)]
    assert events[0]["error"] == f"{type(error).__name__}: {error}"


def test_a_failed_commit_names_its_slot(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CommitFailed):
        call_commit(hooks_over(CommitFailed("lost")))
    assert "slot=6" in caplog.text
