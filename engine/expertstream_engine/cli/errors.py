"""How a command ends when it does not end well: one message on stderr, and an exit code that says whose fault it is."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TextIO

import typer

from expertstream_engine.cli.consoles import OutputFailed, say
from expertstream_engine.cli.logs import configure_log
from expertstream_engine.cli.signals import ended

FAILED, CANNOT_BE, READER_GONE = 1, 2, 141
"""Exit codes. CANNOT_BE: what was asked for cannot be, or this machine or its device cannot do it; FAILED: storage or a
part of this program failed. The last one is what a shell reports for a process that SIGPIPE ended."""

P = ParamSpec("P")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """The command with its errors turned into messages and exit codes; what a signal ends is left to `main`.

    It also obeys the options `verbose` and `debug` of the command, which need not look at them.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            configure_log(verbose=bool(kwargs.get("verbose")))
            command(*args, **kwargs)
        except BrokenPipeError:
            _drop(sys.stdout, sys.stderr)
            raise typer.Exit(READER_GONE) from None
        except OutputFailed as error:
            _drop(sys.stdout)
            say(f"error: {error}")
            raise typer.Exit(FAILED) from None
        except Exception as error:  # noqa: BLE001  # the outermost border: a person gets a message, --debug the rest
            if kwargs.get("debug"):
                traceback.print_exc()
            message, code = _explained(error)
            if message is not None:
                say(f"error: {message}")
            raise typer.Exit(code) from None

    return run


def code_of_failed_output(error: BaseException) -> int | None:
    """The exit code where help or the version could not be written, which is said; None for any other error.

    They are written by the parser of the command line, which makes an exit with 1 of a reader that is gone.
    """
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        _drop(sys.__stdout__, sys.__stderr__)
        return READER_GONE
    if isinstance(error, OSError) and error.filename is None:  # which one that could not be opened has
        _drop(sys.__stdout__)
        say(f"error: standard output cannot be written: {error.strerror}")
        return FAILED
    return None


def _explained(error: Exception) -> tuple[str | None, int]:
    """What to say of an error, and its exit code; nothing of one that a signal raised in foreign code may have left."""
    # Not imported: what is to be explained may be that the library cannot be, and then it raised nothing of its own.
    errors = sys.modules.get("expertstream.errors")
    if errors is None or not isinstance(error, errors.ExpertstreamError):
        if ended() is not None:
            return None, FAILED
        if isinstance(error, MemoryError):
            return (
                f"memory cannot be had: {error}; ask for less expert memory or a shorter context, or raise the limit on"
                " address space (ulimit -v) where there is one",
                CANNOT_BE,
            )
        return f"unexpected {type(error).__name__}: {error}: run again with --debug for the traceback", FAILED
    message = "\n".join([str(error), *getattr(error, "__notes__", ())])
    broken = errors.ReadFailed, errors.BackendContractError, errors.UsageError
    return message, FAILED if isinstance(error, broken) else CANNOT_BE


def _drop(*streams: TextIO | None) -> None:
    """Let the interpreter's last flush go nowhere instead of failing once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        if stream is not None:
            os.dup2(nowhere, stream.fileno())
