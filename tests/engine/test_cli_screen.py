"""What a run shows on a terminal: text whole, status apart, and nothing that moves a cursor on its own."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from expertstream_engine.cli import screen as screen_module
from expertstream_engine.cli.consoles import printable
from expertstream_engine.cli.screen import Screen, rows_of

SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@given(st.text("ab \u3042\U0001f600\u0301", max_size=60), st.integers(2, 12))
def test_rows_lose_nothing_and_fit(line: str, width: int) -> None:
    rows = rows_of(line, width)
    assert "".join(rows) == line
    assert all(cell_len(row.rstrip(" ")) <= width for row in rows)


def test_rows_end_between_words() -> None:
    assert rows_of("one two three", 8) == ["one two ", "three"]
    assert rows_of("one two", 7) == ["one two"]
    assert rows_of("abcdefgh", 3) == ["abc", "def", "gh"]


def test_rows_of_text_that_comes_in_pieces_are_those_of_the_whole() -> None:
    text = "In the beginning God created the heaven and the earth."
    full: list[str] = []
    row = ""
    for character in text:
        *finished, row = rows_of(row + character, 11)
        full += finished
    assert [*full, row] == rows_of(text, 11)


@given(st.text(max_size=40))
def test_no_control_character_reaches_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert len(shown) == len(text)


def test_text_that_looks_like_markup_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen(shows_text=True) as screen:
        screen.text("[bold]x[/bold] :smile: \x1b[31m")
    assert capsys.readouterr().out == "[bold]x[/bold] :smile: \x1b[31m\n", "a file gets what the model wrote"


def test_without_text_stdout_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen(shows_text=False) as screen:
        screen.text("x")
        screen.progress("weights", 1, 2)
        screen.status(lambda: "y")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_on_a_terminal_text_and_status_stay_apart() -> None:
    program = (
        "from expertstream_engine.cli.screen import Screen\n"
        "with Screen(shows_text=True) as screen:\n"
        "    screen.status(lambda: '12.5 tokens/s')\n"
        "    for piece in ('[bold]one[/bold] ', 'two \\x1b[2J', 'three ' * 10, 'end\\nlast'):\n"
        "        screen.text(piece)\n"
    )
    shown = on_a_terminal(program)
    assert "12.5 tokens/s" in shown
    assert "\x1b[2J" not in shown
    plain = SEQUENCE.sub("", shown).replace("\r", "")
    assert "[bold]one[/bold] two \u241b[2Jthree" in plain
    assert plain.endswith("last\n")
    assert "\x1b[?25h" in shown.split("last")[-2] + shown.split("last")[-1], "the cursor is visible again"


def test_a_terminal_that_moves_no_cursor_gets_the_text_alone() -> None:
    program = (
        "from expertstream_engine.cli.screen import Screen\n"
        "with Screen(shows_text=True) as screen:\n"
        "    screen.status(lambda: '12.5 tokens/s')\n"
        "    screen.text('one ')\n"
        "    screen.text('two')\n"
    )
    assert on_a_terminal(program, "dumb") == "one two\r\n"


@pytest.mark.parametrize(("after_s", "told"), [(0.0, "compiling kernel Q4_K ...\n"), (3600.0, "")])
def test_without_a_status_only_a_slow_compilation_is_told_of(
    after_s: float, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen_module, "_TELL_AFTER_S", after_s)
    with Screen(shows_text=True) as screen:
        screen.progress("kernel Q4_K", 0, 0)
        if told:
            for thread in threading.enumerate():
                if isinstance(thread, threading.Timer):
                    thread.join()
    assert capsys.readouterr() == ("", told)


def test_without_a_status_loading_is_told_of_at_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 0.5, 1.5, 2.0, 2.6])
    monkeypatch.setattr(screen_module, "monotonic", lambda: next(now))
    with Screen(shows_text=True) as screen:
        for done in range(1, 6):
            screen.progress("weights", done << 30, 5 << 30)
    assert capsys.readouterr().err == "loading weights: 60 % of 5.00 GiB\nloading weights: 100 % of 5.00 GiB\n"


def on_a_terminal(program: str, kind: str = "xterm") -> str:
    """All that a Python program writes to a terminal that is both its stdout and its stderr."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": kind, "COLUMNS": "60", "LINES": "24"}
    with subprocess.Popen([sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        written = io.BytesIO()
        while chunk := _read(ours):
            written.write(chunk)
    os.close(ours)
    return written.getvalue().decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO: Linux's way to say that the other end is closed
        return b""
