"""Who writes where: results to stdout, everything else to stderr, and nothing raw that could move a cursor."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}  # Unicode's control pictures
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

_START_IS_SLOW_AFTER_S = 0.3


class OutputFailed(Exception):
    """What was to be written to stdout could not be; the disk is full, say."""


def printable(text: str) -> str:
    """`text` with a visible sign for each control character but newline and tab, safe for a terminal."""
    return text.translate(_PICTURES)


def say(message: str) -> None:
    """Print a message for the user on stderr, as it is but for control characters; on a terminal in whole words."""
    stderr = console(stderr=True)
    # A path that is wider than the terminal stays in one piece, for who copies it.
    stderr.print(printable(message), overflow="ignore", crop=False, soft_wrap=not stderr.is_terminal)


def put(text: str) -> None:
    """Write a result to stdout at once, as it is. Raises OutputFailed, or BrokenPipeError if its reader is gone."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(f"standard output cannot be written: {error.strerror}") from error


def print_json(value: dict[str, Any] | list[Any]) -> None:
    """Print one JSON document on stdout, in a line of its own."""
    put(json.dumps(value, allow_nan=False) + "\n")


def print_table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows of text on stdout, under heads unless all of them are empty; only a terminal's are wrapped."""
    stdout = console(stderr=False)
    lines = table_lines(heads, rows, width=stdout.width if stdout.is_terminal else None)
    if stdout.is_terminal and any(heads):
        stdout.print(Text(lines.pop(0), "dim"), soft_wrap=True)
    put("".join(f"{line}\n" for line in lines))


def table_lines(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, width: int | None = None) -> list[str]:
    """The lines of a table, under heads unless all of them are empty.

    With a `width`, the last column is wrapped between words to fit; a longer word, such as a path, stays whole.
    """
    table = [tuple(map(printable, row)) for row in ([heads] if any(heads) else []) + list(rows)]
    *column_widths, _ = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    indent = sum(column_width + len(_GAP) for column_width in column_widths)
    lines = []
    for *cells, last in table:
        first, *more = _wrapped(last, None if width is None else max(width - indent, _NARROWEST_COLUMN))
        lines.append(_GAP.join([*map(_set_left, cells, column_widths), first]).rstrip())
        lines += [" " * indent + line for line in more]
    return lines


def size_text(size_bytes: int) -> str:
    """An amount of memory without its exact bytes: "8.00 GiB"."""
    from expertstream import format_bytes

    return format_bytes(size_bytes).partition(" (")[0]


def counted(count: int, noun: str) -> str:
    """A number of things: "1 token", "2 tokens"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def console(*, stderr: bool) -> Console:
    """A rich console that takes no text for markup and leaves a broken pipe to its caller."""
    return _Console(stderr=stderr, markup=False, emoji=False, highlight=False)


@contextmanager
def starting() -> Iterator[None]:
    """Tell a person at a terminal that the program is starting, if that takes longer than a moment, until it has."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    told = threading.Event()

    def tell() -> None:
        sys.stderr.write("starting ...\r")
        sys.stderr.flush()
        told.set()

    timer = threading.Timer(_START_IS_SLOW_AFTER_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if told.is_set():
            sys.stderr.write("\x1b[K")
            sys.stderr.flush()


_GAP = "  "
_NARROWEST_COLUMN = 24


def _set_left(cell: str, width: int) -> str:
    return cell + " " * (width - cell_len(cell))


def _wrapped(text: str, width: int | None) -> list[str]:
    lines = text.split("\n")
    if width is None:
        return lines
    return [
        piece
        for line in lines
        for piece in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    ]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Called by rich inside its `except BrokenPipeError`; its own version ends the process."""
        raise  # see above
