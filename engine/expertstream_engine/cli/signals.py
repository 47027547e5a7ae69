"""What ends the process from outside: SIGINT, SIGTERM and SIGHUP, each as one exception, from the first import on."""

from __future__ import annotations

import os
import signal
import stat
from types import FrameType


class Ended(KeyboardInterrupt):
    """A signal asked the process to end. As text it is what to say last; `exit_code` is what a shell reports for it."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def raise_on_signals() -> None:
    """Let the signals raise Ended in the main thread, but for those that whoever started this has ignored (nohup)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def ended() -> Ended | None:
    """The last of the signals that came, None before the first."""
    return _ended


_ended: Ended | None = None


def _end(number: int, _: FrameType | None) -> None:
    global _ended
    _ended = Ended(number)
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_IGN)  # it often comes twice, and must not break off the tidying up
    if number == signal.SIGHUP:
        _leave_gone_terminal()
    raise _ended


def _leave_gone_terminal() -> None:
    """Let output go nowhere where it went to a terminal that is gone, and would fail; a terminal still there stays."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
