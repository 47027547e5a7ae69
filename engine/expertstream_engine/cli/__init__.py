"""The command line `expertstream`, from the outside: its process, its streams and its signals.

The commands are in `commands`. Nothing that takes long is imported here, so that a signal which comes while the rest
is being imported ends the process as quietly as a later one.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper

from expertstream_engine.cli.signals import ended, raise_on_signals, rest

__all__ = ["main"]


def main() -> None:
    """Run the command line; the console script."""
    raise_on_signals()
    try:
        _prepare_streams()
        from expertstream_engine.cli.commands import app

        app()
    except BaseException as error:  # the parser of the command line makes an exit of nearly everything
        rest()
        if (by_signal := ended()) is not None:  # whatever came of it
            _say_last(str(by_signal))
            sys.exit(by_signal.exit_code)
        from expertstream_engine.cli.errors import CANNOT_BE, code_of_failed_output

        if (code := code_of_failed_output(error)) is not None:
            sys.exit(code)
        if isinstance(error, SystemExit) and error.code == CANNOT_BE:
            _leave_at_once(CANNOT_BE)
        raise


def _leave_at_once(code: int) -> None:
    """End without freeing what goes with the process: a device that has failed would refuse it, piece by piece."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # one that cannot be written to or is closed, which the code does not tell
            stream.flush()
    os._exit(code)


def _say_last(message: str) -> None:
    try:
        print(message, file=sys.stderr)
    except OSError:  # nobody is left to be told, and the interpreter's last flush is not to fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this; print() would take the other one instead
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open until the process ends
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal's encoding may lack what a model writes
