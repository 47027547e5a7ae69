"""The log of this library: where its events go. It configures nothing; the application does."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any, cast

import structlog
from structlog.typing import FilteringBoundLogger, WrappedLogger

LOGGER_NAME = "expertstream"


def get_log() -> FilteringBoundLogger:
    """The log of this library: structlog's as the application configured it, else the standard logger "expertstream".

    Call it when there is something to log and do not keep it, so that a later `structlog.configure` counts.
    """
    if structlog.is_configured():
        return cast(FilteringBoundLogger, structlog.get_logger(LOGGER_NAME))
    return _standard_log


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
