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
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Group
from rich.live import Live
from rich.text import Text

from expertstream_engine.cli.consoles import console, printable, put, say, size_text

_TELL_EVERY_S = 1.0
_ECHO_CHARACTERS = 400


class Screen:
    """Text on stdout, status and progress on stderr; a context manager, for one thread.

    Text goes straight to stdout, except where it shares a terminal with the live status: there finished rows scroll
    up and the last one is drawn with the status. Without a terminal for the status, it is told of line by line, once
    a second, until there is text.
    """

    def __init__(self, *, shows_text: bool) -> None:
        """`shows_text` False leaves stdout alone."""
        self._shows_text = shows_text
        self._stdout_is_terminal = sys.stdout.isatty()
        self._row = ""
        self._dim_characters = 0  # of what was drawn last, those that are the prompt's
        self._ends_line = True
        self._status: Callable[[], str] = lambda: ""
        self._loading = self._pinning = ""
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
        self._teller: _Teller | None = None if lively else _Teller(lambda: self._status())

    def echo(self, prompt: str) -> None:
        """Show what is to be continued, its end at least, dim and on a terminal alone."""
        if not (prompt and self._shows_text and self._stdout_is_terminal):
            return
        shown = prompt if len(prompt) <= _ECHO_CHARACTERS else "…" + prompt[-_ECHO_CHARACTERS:]
        shown = printable(shown).expandtabs(4)
        self._ends_line = shown.endswith("\n")
        if self._draws_text:
            self._dim_characters = len(shown)
            self._draw(shown)
        else:
            console(stderr=False).print(Text(shown, "dim"), end="", soft_wrap=True)

    def text(self, piece: str) -> None:
        """Show a piece of text at once."""
        if not piece or not self._shows_text:
            return
        self._ends_line = piece.endswith("\n")
        if self._draws_text:
            self._draw(printable(piece).expandtabs(4))
        else:
            put(printable(piece) if self._stdout_is_terminal else piece)

    def status(self, status: Callable[[], str]) -> None:
        """Show what `status` answers from now on, live; it is called from another thread, several times a second."""
        self._status = status

    def end_telling(self) -> None:
        """From now on the status is for a terminal alone."""
        if self._teller is not None:
            self._teller.end()

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far loading is; arguments as of `expertstream_engine.session.Progress`."""
        if what == "host tier":  # which goes on beside all else, and is shown with it until it is whole
            self._pinning = f"host tier {size_text(done)} of {size_text(total)} pinned" if done < total else ""
        elif what in ("weights", "hot experts"):
            self._loading = f"loading {what}: {100 * done // max(total, 1)} % of {size_text(total)}"
        elif what == "slots":
            self._loading = f"allocating {size_text(total)} of slots ..."
        else:
            self._loading = f"preparing {what} ..."  # compiled or from a cache, which is not known beforehand
        line = ", ".join(filter(None, (self._loading, self._pinning)))
        self._status = lambda: line

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        if self._teller is not None:
            self._teller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_telling()
        if self._live is not None:
            self._live.stop()
        if kind is not None and issubclass(kind, BrokenPipeError):
            return
        if not self._ends_line:
            if self._draws_text:
                self._console.print(self._dimmed(self._row), soft_wrap=True)
            else:
                put("\n")

    def _draw(self, text: str) -> None:
        """Scroll up the rows that nothing more can change, and keep the last one for the live part."""
        *lines, last = (self._row + text).split("\n")
        width = self._console.width
        rows: list[tuple[str, int]] = []  # each with how many characters of the text it stands for
        for line in lines:
            *full, end = rows_of(line, width)
            rows += [(row, len(row)) for row in full] + [(end, len(end) + 1)]
        *full, self._row = rows_of(last, width)
        rows += [(row, len(row)) for row in full]
        if rows:
            drawn = []
            for row, characters in rows:
                # Spaces at the end of a full row would begin the next one.
                drawn.append(self._dimmed(row.rstrip(" ")))
                self._dim_characters = max(0, self._dim_characters - characters)
            self._console.print(Text("\n").join(drawn), soft_wrap=True)

    def _dimmed(self, row: str) -> Text:
        text = Text(row, no_wrap=True, overflow="ellipsis")
        text.stylize("dim", 0, self._dim_characters)
        return text

    def _drawn(self) -> Group:
        row, status = self._row.rstrip(" "), self._status()
        status_row = Text(status, "dim", no_wrap=True, overflow="ellipsis")
        return Group(*(text for text in (self._dimmed(row), status_row) if text))


class _Teller:
    """Says what `status` answers on stderr once a second, if it has changed, from a thread of its own."""

    def __init__(self, status: Callable[[], str]) -> None:
        self._status = status
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Say nothing any more; a second call does nothing."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        told = ""
        while not self._ended.wait(_TELL_EVERY_S):
            line = self._status()
            if line == told:
                continue
            try:
                say(line)
            except BrokenPipeError:  # whoever read stderr is gone; the main thread finds out when it has to tell
                return
            told = line


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
