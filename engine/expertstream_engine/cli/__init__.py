"""The command line `expertstream`, from the outside: its process, its streams and its signals.

The commands are in `commands`. Nothing that takes long is imported here, so that a signal which comes while the rest
is being imported ends the process as quietly as a later one.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

from expertstream_engine.cli.signals import ended, raise_on_signals

__all__ = ["main"]


def main() -> None:
    """Run the command line; the console script."""
    raise_on_signals()
    try:
        _prepare_streams()
        from expertstream_engine.cli.commands import app

        app()
    except (KeyboardInterrupt, SystemExit):  # the parser of the command line makes an exit of an interrupt
        if (by_signal := ended()) is None:
            raise
        print(by_signal, file=sys.stderr)
        sys.exit(by_signal.exit_code)


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this; print() would take the other one instead
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open until the process ends
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal's encoding may lack what a model writes
