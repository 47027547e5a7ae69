"""Where the library's log goes in the command line: readable lines on stderr, warnings always, the rest when asked."""

from __future__ import annotations

import logging
import sys


def configure_log(*, verbose: bool) -> None:
    """Send events to stderr: warnings, and with `verbose` what was decided and allocated."""
    import structlog

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO if verbose else logging.WARNING),
        # Asked for at every event: while a status is shown, sys.stderr is what keeps lines apart from it.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
