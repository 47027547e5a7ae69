"""How a command ends when it does not end well: one message on stderr, and an exit code that says whose fault it is."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec

import typer

from expertstream_engine.cli.consoles import say
from expertstream_engine.cli.logs import configure_log

FAILED, BAD_INPUT, INTERRUPTED, READER_GONE = 1, 2, 130, 141
"""Exit codes; the last two are what a shell reports for a process that SIGINT or SIGPIPE ended."""

P = ParamSpec("P")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """The command with its errors turned into messages and exit codes.

    It also obeys the options `verbose` and `debug` of the command, which need not look at them.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        configure_log(verbose=bool(kwargs.get("verbose")))
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(READER_GONE) from None
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:  # noqa: BLE001  # the outermost border: a person gets a message, --debug the rest
            if kwargs.get("debug"):
                traceback.print_exc()
            message, code = _explained(error)
            say(f"error: {message}")
            raise typer.Exit(code) from None

    return run


def _explained(error: Exception) -> tuple[str, int]:
    from expertstream import (
        BackendContractError,
        CommitFailed,
        DeviceOutOfMemory,
        ExpertstreamError,
        ReadFailed,
        UsageError,
    )

    if not isinstance(error, ExpertstreamError):
        return f"unexpected {type(error).__name__}: {error}: run again with --debug for the traceback", FAILED
    message = "\n".join([str(error), *getattr(error, "__notes__", ())])
    not_the_users = (ReadFailed, DeviceOutOfMemory, CommitFailed, BackendContractError, UsageError)
    return message, FAILED if isinstance(error, not_the_users) else BAD_INPUT


def _drop_output() -> None:
    """Let the interpreter's last flush go nowhere instead of failing once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
