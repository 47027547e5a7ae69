"""What a run shows while it lasts: its text as it comes, and how far it is.

It owns both output streams for that time, and decides by what they are connected to; it knows nothing of models.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable
from itertools import accumulate
from time import monotonic
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Group
from rich.live import Live
from rich.text import Text

from expertstream_engine.cli.consoles import console, printable, say, size_text

_TELL_AFTER_S = 1.0


class Screen:
    """Text on stdout, status and progress on stderr; a context manager, for one thread.

    Text goes straight to stdout, except where it shares a terminal with the live status: there finished rows scroll
    up and the last one is drawn with the status. Without a terminal for the status, only long work is told of.
    """

    def __init__(self, *, shows_text: bool) -> None:
        """`shows_text` False leaves stdout alone."""
        self._shows_text = shows_text
        self._stdout_is_terminal = sys.stdout.isatty()
        self._row = ""
        self._ends_line = True
        self._status: Callable[[], str] = lambda: ""
        self._slow_work: threading.Timer | None = None
        self._told_at: float | None = None
        shares = shows_text and self._stdout_is_terminal
        self._console = console(stderr=not shares)
        lively = sys.stderr.isatty() and self._console.is_interactive  # which a dumb terminal is not
        if shows_text and not shares and lively:
            # Behind a pipe another program may write to this very terminal, and the status would paint over it.
            lively = not _is_pipe(sys.stdout.fileno())
        self._draws_text = shares and lively
        self._live: Live | None = None
        if lively:
            self._live = Live(
                get_renderable=self._drawn,
                console=self._console,
                refresh_per_second=10,
                transient=True,
                redirect_stdout=False,
            )

    def text(self, piece: str) -> None:
        """Show a piece of text at once."""
        if not piece or not self._shows_text:
            return
        self._ends_line = piece.endswith("\n")
        if self._draws_text:
            self._draw(printable(piece).expandtabs(4))
        else:
            sys.stdout.write(printable(piece) if self._stdout_is_terminal else piece)
            sys.stdout.flush()

    def status(self, status: Callable[[], str]) -> None:
        """Show what `status` answers from now on, live; it is called from another thread, several times a second."""
        self._end_slow_work()
        self._status = status

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far loading is; arguments as of `expertstream_engine.session.Progress`."""
        self._end_slow_work()
        if what == "weights":
            line = f"loading weights: {100 * done // max(total, 1)} % of {size_text(total)}"
            self._tell_at_times(line)
        else:
            line = f"allocating {size_text(total)} of slots ..." if what == "slots" else f"compiling {what} ..."
            self._tell_if_slow(line)
        self._status = lambda: line

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_slow_work()
        if self._live is not None:
            self._live.stop()
        if kind is not None and issubclass(kind, BrokenPipeError):
            return
        if not self._ends_line:
            sys.stdout.write(self._row + "\n")
            sys.stdout.flush()

    def _draw(self, text: str) -> None:
        """Scroll up the rows that nothing more can change, and keep the last one for the live part."""
        *lines, last = (self._row + text).split("\n")
        width = self._console.width
        rows = [row for line in lines for row in rows_of(line, width)]
        *full, self._row = rows_of(last, width)
        rows += full
        if rows:
            # Spaces at the end of a full row would begin the next one.
            self._console.print("\n".join(row.rstrip(" ") for row in rows), soft_wrap=True)

    def _drawn(self) -> Group:
        lines = ((self._row.rstrip(" "), ""), (self._status(), "dim"))
        return Group(*(Text(line, style, no_wrap=True, overflow="ellipsis") for line, style in lines if line))

    def _tell_at_times(self, line: str) -> None:
        now = monotonic()
        if self._told_at is None:
            self._told_at = now
        elif self._live is None and now - self._told_at >= _TELL_AFTER_S:
            self._told_at = now
            say(line)

    def _tell_if_slow(self, line: str) -> None:
        """Most kernels come from a cache in no time, which is not known beforehand."""
        if self._live is None:
            self._slow_work = threading.Timer(_TELL_AFTER_S, say, [line])
            self._slow_work.daemon = True
            self._slow_work.start()

    def _end_slow_work(self) -> None:
        if self._slow_work is not None:
            self._slow_work.cancel()
            self._slow_work = None


def rows_of(line: str, width: int) -> list[str]:
    """The rows of a line on a terminal of `width` cells, ended after spaces; together they are the line."""
    rows = []
    while cell_len(line.rstrip(" ")) > width:
        ends = accumulate(map(cell_len, line))
        fitting = next(number for number, end in enumerate(ends) if end > width)
        cut = line.rfind(" ", 0, fitting + 1) + 1 or max(fitting, 1)
        rows.append(line[:cut])
        line = line[cut:]
    return [*rows, line]


def _is_pipe(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
