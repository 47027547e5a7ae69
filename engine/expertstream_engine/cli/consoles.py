"""Who writes where: results to stdout, everything else to stderr, and nothing raw that could move a cursor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}  # Unicode's control pictures
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """`text` with a visible sign for each control character but newline and tab, safe for a terminal."""
    return text.translate(_PICTURES)


def say(message: str) -> None:
    """Print a message for the user on stderr, as it is but for control characters; on a terminal in whole words."""
    stderr = console(stderr=True)
    stderr.print(printable(message), soft_wrap=not stderr.is_terminal)


def print_json(value: dict[str, Any] | list[Any]) -> None:
    """Print one JSON document on stdout, in a line of its own."""
    print(json.dumps(value, allow_nan=False), flush=True)


def console(*, stderr: bool) -> Console:
    """A rich console that takes no text for markup and leaves a broken pipe to its caller."""
    return _Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def print_table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows of text on stdout, under heads unless all of them are empty."""
    table = Table(*heads, box=None, pad_edge=False, show_header=any(heads), header_style="dim")
    for column in table.columns:
        column.overflow = "fold"  # a path is of no use without its end
    for row in rows:
        table.add_row(*map(printable, row))
    console(stderr=False).print(table)


def size_text(size_bytes: int) -> str:
    """An amount of memory without its exact bytes: "8.00 GiB"."""
    from expertstream import format_bytes

    return format_bytes(size_bytes).partition(" (")[0]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Called by rich inside its `except BrokenPipeError`; its own version ends the process."""
        raise  # see above
