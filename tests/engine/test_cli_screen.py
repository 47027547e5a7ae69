"""What a run shows on a terminal: text whole, status apart, and nothing that moves a cursor on its own."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from expertstream_engine.cli import screen as screen_module
from expertstream_engine.cli.consoles import printable, table_lines
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


def test_without_a_terminal_the_status_is_told_until_there_is_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen_module, "_TELL_EVERY_S", 0.001)
    asked, told = threading.Semaphore(0), []

    def reading() -> str:
        asked.release()
        return "reading the prompt: layer 1 of 2"

    with Screen(shows_text=True) as screen:
        screen.status(reading)
        for _ in range(3):
            assert asked.acquire(timeout=60)
        screen.end_telling()
        screen.status(lambda: told.append("later") or "later")
        screen.text("text")
    assert capsys.readouterr() == ("text\n", "reading the prompt: layer 1 of 2\n"), "once, as it did not change"
    assert told == []


def test_what_ends_within_a_moment_is_not_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen_module, "_TELL_EVERY_S", 3600.0)
    with Screen(shows_text=True) as screen:
        screen.progress("kernel Q4_K", 0, 0)
        screen.progress("weights", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_how_far_the_host_tier_is_stands_beside_all_that_loads_until_it_is_whole() -> None:
    screen = Screen(shows_text=True)
    lines = []
    for progress in (
        ("slots", 0, 3 << 30),
        ("host tier", 0, 24 << 30),
        ("kernel Q4_K", 0, 0),
        ("host tier", 3 << 30, 24 << 30),
        ("weights", 3 << 30, 5 << 30),
        ("hot experts", 1 << 30, 4 << 30),
        ("host tier", 24 << 30, 24 << 30),
    ):
        screen.progress(*progress)
        lines.append(screen._status())
    assert lines == [
        "allocating 3.00 GiB of slots ...",
        "allocating 3.00 GiB of slots ..., host tier 0 bytes of 24.00 GiB pinned",
        "preparing kernel Q4_K ..., host tier 0 bytes of 24.00 GiB pinned",
        "preparing kernel Q4_K ..., host tier 3.00 GiB of 24.00 GiB pinned",
        "loading weights: 60 % of 5.00 GiB, host tier 3.00 GiB of 24.00 GiB pinned",
        "loading hot experts: 25 % of 4.00 GiB, host tier 3.00 GiB of 24.00 GiB pinned",
        "loading hot experts: 25 % of 4.00 GiB",
    ]


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (("kernel Q4_K", 0, 0), "preparing kernel Q4_K ..."),  # it may come from the cache
        (("slots", 0, 3 << 30), "allocating 3.00 GiB of slots ..."),
        (("weights", 3 << 30, 5 << 30), "loading weights: 60 % of 5.00 GiB"),
    ],
)
def test_progress_says_what_is_done(
    progress: tuple[str, int, int], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen_module, "_TELL_EVERY_S", 0.001)
    said = threading.Event()
    real_say = screen_module.say

    def say(message: str) -> None:
        real_say(message)
        said.set()

    monkeypatch.setattr(screen_module, "say", say)
    with Screen(shows_text=False) as screen:
        screen.progress(*progress)
        assert said.wait(60)
    assert line in capsys.readouterr().err.splitlines()


def test_the_prompt_is_echoed_dimly_before_its_continuation_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = (
        "from expertstream_engine.cli.screen import Screen\n"
        "with Screen(shows_text=True) as screen:\n"
        "    screen.echo('In the\\nbeginning')\n"
        "    screen.text(' God\\n')\n"
    )
    shown = on_a_terminal(program)
    assert re.search(r"\x1b\[2mIn the\x1b\[0m\s+(\x1b\[2K)?\x1b\[2mbeginning\x1b\[0m God\r\n", shown)
    assert on_a_terminal(program, "dumb") == "In the\r\nbeginning God\r\n"
    with Screen(shows_text=True) as screen:
        screen.echo("In the beginning")
        screen.text(" God")
    assert capsys.readouterr().out == " God\n"


def test_a_slow_start_is_told_of_on_a_terminal_and_taken_back() -> None:
    program = (
        "import threading\n"
        "from expertstream_engine.cli import consoles\n"
        "consoles._START_IS_SLOW_AFTER_S = {after_s}\n"
        "with consoles.starting():\n"
        "    if {waits}:\n"
        "        [thread.join() for thread in threading.enumerate() if isinstance(thread, threading.Timer)]\n"
        "print('ready')\n"
    )
    assert on_a_terminal(program.format(after_s=0.0, waits=True)) == "starting ...\r\x1b[Kready\r\n"
    assert on_a_terminal(program.format(after_s=3600.0, waits=False)) == "ready\r\n"
    assert on_a_terminal(program.format(after_s=0.0, waits=True), "dumb") == "ready\r\n"


def test_a_terminal_gets_tables_in_its_width_with_paths_whole() -> None:
    path = "/models/" + "x" * 70 + ".gguf"
    lines = table_lines(("", ""), [("file", path), ("note", "many words " * 10)], width=40)
    assert lines[0] == f"file  {path}", "for who copies it"
    assert all(len(line) <= 40 for line in lines[1:])
    assert all(line.startswith(" " * 6) for line in lines[2:])
    assert table_lines(("", ""), [("note", "many words " * 10)]) == ["note  " + ("many words " * 10).rstrip()]


def test_a_message_on_a_terminal_keeps_a_path_in_one_piece() -> None:
    path = "/models/" + "x" * 70 + ".gguf"
    shown = on_a_terminal(f"from expertstream_engine.cli.consoles import say\nsay('error: there is no ' + {path!r})")
    assert path in shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_the_terminal_with_its_cursor(number: signal.Signals, code: int) -> None:
    program = (
        "import os\n"
        "from expertstream_engine.cli.commands import app\n"
        "from expertstream_engine.cli import main, screen\n"
        "real = screen.Screen.text\n"
        f"screen.Screen.text = lambda self, piece: (real(self, piece), os.kill(os.getpid(), {int(number)}))\n"
        "import sys\n"
        "sys.argv[1:] = ['run', '--token-ids', '5,6', '-n', '4']\n"
        f"try:\n    main()\nexcept SystemExit as ended:\n    assert ended.code == {code}, ended.code\n"
    )
    shown = on_a_terminal(program)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "1 token generated, ended by interruption" in shown
    assert shown.endswith(f"interrupted by {number.name}\r\n")


def test_a_terminal_that_is_gone_ends_a_run_quietly() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from expertstream_engine.cli import main; main()"]
    arguments = ["run", "--token-ids", "5,6,7", "--ignore-eos", "-n", "500", "--expert-memory", "532480"]
    with subprocess.Popen(
        [*command, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_own_terminal,
    ) as process:
        os.close(theirs)
        shown = b""
        while b"/500 tokens" not in shown:
            chunk = _read(ours)
            assert chunk, shown
            shown += chunk
        os.close(ours)
        assert process.wait(timeout=120) == 129


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


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
