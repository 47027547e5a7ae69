"""What watches a run: the log, and the hook wrappers that write the backend's answers into it.

It never changes an answer. Events are short constant names with fields; nothing is logged on a hit or on a
commit that succeeds, and nothing is ever written to standard output by default.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, MutableMapping
from typing import Any, cast

import structlog
from structlog.typing import FilteringBoundLogger, WrappedLogger

from expertstream.hookspecs import hookimpl
from expertstream.slots import Commit, SlotBudget, SlotLayout, SlotStore, Staging

LOGGER_NAME = "expertstream"


def get_log() -> FilteringBoundLogger:
    """The log of this library: structlog's as the application configured it, else the standard logger "expertstream".

    Call it when there is something to log and do not keep it, so that a later `structlog.configure` counts.
    """
    if structlog.is_configured():
        return cast(FilteringBoundLogger, structlog.get_logger(LOGGER_NAME))
    return _standard_log


class LogHooks:
    """Hook wrappers that log what the backend grants, allocates and fails at. Register one in the plugin manager."""

    @hookimpl(wrapper=True)
    def budget_for_expert_size(
        self, expert_bytes: int, resident_bytes: int, asked: int | None
    ) -> Generator[None, SlotBudget, SlotBudget]:
        fields = {"expert_bytes": expert_bytes, "resident_bytes": resident_bytes, "asked_slots": asked}
        try:
            budget = yield
        except Exception as error:
            get_log().warning("budget_failed", **fields, error=_described(error))
            raise
        get_log().info("slots_granted", **fields, slot_count=budget.slots, reason=budget.reason)
        return budget

    @hookimpl(wrapper=True)
    def alloc_slot_store(self, layout: SlotLayout, slot_count: int) -> Generator[None, SlotStore, SlotStore]:
        fields = {"slot_bytes": layout.slot_bytes, "slot_count": slot_count}
        try:
            store = yield
        except Exception as error:
            get_log().warning("slot_store_failed", **fields, error=_described(error))
            raise
        get_log().info("slot_store_allocated", **fields, total_bytes=layout.slot_bytes * slot_count)
        return store

    @hookimpl(wrapper=True)
    def commit_slot(self, staging: Staging) -> Generator[None, Commit, Commit]:
        try:
            return (yield)
        except Exception as error:
            get_log().warning("commit_failed", slot=staging.slot, error=_described(error))
            raise


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _as_log_arguments(
    _logger: WrappedLogger, _method: str, event: MutableMapping[str, Any]
) -> tuple[tuple[str], dict[str, Any]]:
    """`event key=value ...` as the message of a standard log record."""
    name = event.pop("event")
    arguments = {key: event.pop(key) for key in ("exc_info", "stack_info") if key in event}
    return (" ".join([name, *(f"{key}={value!r}" for key, value in event.items())]),), arguments


_standard_log: FilteringBoundLogger = structlog.wrap_logger(
    logging.getLogger(LOGGER_NAME),
    processors=[structlog.stdlib.filter_by_level, _as_log_arguments],
    wrapper_class=structlog.stdlib.BoundLogger,
    context_class=dict,
    cache_logger_on_first_use=False,
)
