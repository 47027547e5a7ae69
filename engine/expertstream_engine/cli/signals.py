"""What ends the process from outside: SIGINT, SIGTERM and SIGHUP, each as one exception, from the first import on.

Python raises it in whatever frame is running, also where exceptions go nowhere: in a callback from C or of a weak
reference, in a `__del__`, under an `except:`. So a timer looks whether it is still under way, and raises it again if
not, until `rest` is called.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from types import FrameType

_LOOK_EVERY_S = 0.05
_SOON_S = 0.001


class Ended(KeyboardInterrupt):
    """A signal asked the process to end. As text it is what to say last; `exit_code` is what a shell reports for it."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}")
        self.number = number
        self.exit_code = 128 + number


def raise_on_signals() -> None:
    """Let the signals raise Ended in the main thread, but for those that whoever started this has ignored (nohup).

    The first of them takes SIGALRM and the real-time timer for the rest of the process.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)
    sys.unraisablehook = _notice


def ended() -> Ended | None:
    """The last of the signals that came, None before the first."""
    return _ended


def rest() -> None:
    """Raise nothing any more: a signal ends the process at once, but for a SIGTERM or SIGHUP that comes again."""
    if _ended is not None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one may be on its way
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == _end:
            signal.signal(number, signal.SIG_IGN if number in _came else signal.SIG_DFL)


_ended: Ended | None = None
_came: set[int] = set()  # those that are not to break off the tidying up when they come again
_other_notice = sys.unraisablehook


def _end(number: int, _: FrameType | None) -> None:
    global _ended
    if number in _came and _stems_from_signal(sys.exc_info()[1]):
        return
    _ended = Ended(number)
    if number != signal.SIGINT:
        _came.add(number)  # it often comes twice
    if number == signal.SIGHUP:
        _leave_gone_terminal()
    signal.signal(signal.SIGALRM, _look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_EVERY_S, _LOOK_EVERY_S)
    raise _ended


def _look(_: int, __: FrameType | None) -> None:
    """Raise the exception again if no frame below is on its way out because of it."""
    if _ended is not None and not _stems_from_signal(sys.exc_info()[1]):
        raise Ended(_ended.number)


def _notice(unraisable: sys.UnraisableHookArgs) -> None:
    """Say nothing of an Ended that went nowhere, and look soon: raised here, it would go nowhere once more."""
    if _stems_from_signal(unraisable.exc_value):
        signal.setitimer(signal.ITIMER_REAL, _SOON_S, _LOOK_EVERY_S)
    else:
        _other_notice(unraisable)


def _stems_from_signal(error: BaseException | None) -> bool:
    """Whether a signal raised `error`, or an error during whose handling it was raised."""
    while error is not None and not isinstance(error, Ended):
        error = error.__context__
    return error is not None


def _leave_gone_terminal() -> None:
    """Let output go nowhere where it went to a terminal that is gone, and would fail; a terminal still there stays."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
