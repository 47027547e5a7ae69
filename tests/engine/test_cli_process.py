"""The command line as a process: streams, pipes, signals and what is left when it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from expertstream_engine import BUNDLED_MODEL

COMMAND = (sys.executable, "-c", "from expertstream_engine.cli import main; main()")
ENDLESS = ("run", "--token-ids", "5,6,7", "--ignore-eos", "-n", "500", "--expert-memory", "532480")
PATIENCE_S = 120


def start(arguments: Sequence[str], stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], text=True, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_json_is_all_of_stdout_and_stderr_has_no_report() -> None:
    process = start(("run", "-p", "In the beginning", "-n", "4", "--json"))
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert len(json.loads(out)["tokens"]) == 4
    assert "tokens/s" not in err


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "interrupted by SIGTERM"),
        (signal.SIGHUP, 129, "interrupted by SIGHUP"),
    ],
)
def test_text_comes_while_it_is_generated_and_a_signal_ends_it_with_a_report(
    number: signal.Signals, code: int, word: str
) -> None:
    process = start(ENDLESS)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(number)
    rest, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert len(first) == 1
    assert err.endswith(f"\n{word}\n")
    assert "Traceback" not in err
    assert int(re.findall(r"(\d+) tokens? generated, ended by interruption\n", err)[0]) < 500
    assert rest.endswith("\n")


INTERRUPTED_RUN = """
import os, signal, sys
from expertstream_engine import model
from expertstream_engine.cli import main

calls, interrupted_at = [], int(sys.argv[1])

def route(self, block, *arguments):
    calls.append(block)
    if len(calls) == interrupted_at:
        os.kill(os.getpid(), signal.SIGINT)
    return real_route(self, block, *arguments)

real_route, model.MoeModel._route = model.MoeModel._route, route
sys.argv[1:] = sys.argv[2:]
main()
"""


@pytest.mark.parametrize(("layer_step", "token_count", "decode_passes"), [(3, 0, 0), (4 * 3 + 2, 3, 2)])
def test_ctrl_c_with_json_prints_the_object_so_far(layer_step: int, token_count: int, decode_passes: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED_RUN, str(layer_step), *ENDLESS, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.endswith("interrupted\n")
    record = json.loads(ended.stdout)
    assert record["finish"] == "interrupted"
    assert (len(record["tokens"]), record["decode_passes"]) == (token_count, decode_passes)
    assert record["prefill"]["steps"] + record["decode"]["steps"] == layer_step - 1
    assert record["expert_bytes_read"] > 0
    assert record["prefill_seconds"] > 0, "also of a phase that was broken off"


def test_ctrl_c_before_the_prompt_leaves_stdout_empty() -> None:
    interrupted_start = """
import os, signal, sys
from expertstream_engine import session
from expertstream_engine.cli import main

session.load_resident = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
main()
"""
    command = [sys.executable, "-c", interrupted_start, *ENDLESS, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.endswith("interrupted\n")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("module", ["rich.console", "typer", "numba", "expertstream_engine.demand"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_modules_are_imported_ends_it_with_one_line(
    module: str, number: signal.Signals, code: int
) -> None:
    interrupted_import = f"""
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {int(number)})

from expertstream_engine.cli import main
sys.meta_path.insert(0, Finder())
main()
"""
    command = [sys.executable, "-c", interrupted_import, *ENDLESS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert re.fullmatch(r"interrupted( by SIGTERM)?\n", ended.stderr)


SWALLOWED = """
import ctypes, os, signal, sys, time, weakref
from expertstream_engine import session
from expertstream_engine.cli import main

number, way, afterwards = int(sys.argv[1]), sys.argv[2], sys.argv[3]

class Thing:
    pass

class Dying:
    def __del__(self):
        send()

def send():
    os.kill(os.getpid(), number)

def swallow():
    if way == "ctypes":
        ctypes.CFUNCTYPE(None)(send)()
    elif way == "weakref":
        thing = Thing()
        known = weakref.ref(thing, lambda _: send())
        del thing
    elif way == "del":
        Dying()
    else:
        try:
            send()
        except:
            pass

def load(*_, **__):
    swallow()
    if afterwards == "error":
        raise RuntimeError("no compiled object yet")
    if afterwards == "twice":
        swallow()
        swallow()
    while True:
        time.sleep(0.01)

session.load_resident = load
sys.argv[1:] = sys.argv[4:]
main()
"""


@pytest.mark.parametrize(
    ("number", "code", "word", "way", "afterwards"),
    [
        (signal.SIGTERM, 143, "interrupted by SIGTERM", "ctypes", "endless"),
        (signal.SIGTERM, 143, "interrupted by SIGTERM", "weakref", "twice"),
        (signal.SIGTERM, 143, "interrupted by SIGTERM", "ctypes", "error"),
        (signal.SIGHUP, 129, "interrupted by SIGHUP", "except", "endless"),
        (signal.SIGHUP, 129, "interrupted by SIGHUP", "weakref", "error"),
        (signal.SIGINT, 130, "interrupted", "del", "endless"),
        (signal.SIGINT, 130, "interrupted", "ctypes", "twice"),
    ],
)
def test_a_signal_that_foreign_code_swallows_still_ends_it(
    number: signal.Signals, code: int, word: str, way: str, afterwards: str
) -> None:
    command = [sys.executable, "-c", SWALLOWED, str(int(number)), way, afterwards, *ENDLESS, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stdout) == (code, ""), ended.stderr
    assert ended.stderr.endswith(f"\n{word}\n")
    for unwanted in ("Traceback", "Exception ignored", "error"):
        assert unwanted not in ended.stderr


@pytest.mark.parametrize(
    ("first", "again", "code"),
    [
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGHUP, signal.SIGHUP, 129),
        (signal.SIGINT, signal.SIGALRM, 130),
        (signal.SIGTERM, signal.SIGINT, 130),
    ],
)
def test_nothing_breaks_off_the_tidying_up_but_a_second_ctrl_c(
    first: signal.Signals, again: signal.Signals, code: int
) -> None:
    program = """
import os, signal, sys, time
from expertstream_engine import session
from expertstream_engine.cli import main

first, again, looks = int(sys.argv[1]), int(sys.argv[2]), 5
real_close = session.Model.close

def close(self):
    for _ in range(looks):
        time.sleep(0.05)
        os.kill(os.getpid(), again)
    print("tidied up", file=sys.stderr)
    real_close(self)

def generate(*_, **__):
    os.kill(os.getpid(), first)

session.Model.close, session.Model.generate = close, generate
sys.argv[1:] = sys.argv[3:]
main()
"""
    command = [sys.executable, "-c", program, str(int(first)), str(int(again)), *ENDLESS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == code, ended.stderr
    assert ("tidied up\n" in ended.stderr) is (again != signal.SIGINT)
    assert "Traceback" not in ended.stderr


def test_the_handlers_are_set_before_modules_that_take_time_are_imported() -> None:
    program = "import sys; had = {*sys.modules}; import expertstream_engine.cli; print(*{*sys.modules} - had)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"typing", "typer", "rich", "numpy"} & set(run.stdout.split())


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *COMMAND, *ENDLESS, "-n", "40"],
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "40 tokens generated" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect",),
        ("backends", "--json"),
        ("run", "-p", "a", "-n", "2"),
        ("plan", "--json"),
        ("run", "--help"),
        ("--version",),
    ],
)
def test_a_full_disk_behind_stdout_is_named(arguments: Sequence[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith("error: standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize("arguments", [ENDLESS, ("backends",), ("run", "--help"), ("--version",)])
def test_a_reader_that_goes_away_ends_it_quietly(arguments: Sequence[str]) -> None:
    process = start(arguments)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=PATIENCE_S) == 141
    assert "error" not in err
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    process.stderr.close()


@pytest.mark.parametrize(("closed", "stdout_is_empty"), [("2>&-", False), (">&-", True)])
def test_a_closed_stream_diverts_nothing_to_the_other(closed: str, stdout_is_empty: bool) -> None:
    script = f'exec "$@" {closed}'
    arguments = ["sh", "-c", script, "sh", *COMMAND, "inspect", "--json", str(BUNDLED_MODEL)]
    run = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert (run.stdout == "") is stdout_is_empty
    assert stdout_is_empty or json.loads(run.stdout)["expert_count"] == 64


def test_bad_input_ends_with_2_and_one_message() -> None:
    process = start(("run", "no-such.gguf", "-p", "a"))
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (2, "")
    assert re.fullmatch(r"error: \S*/no-such\.gguf: .*\n", err)


def test_help_waits_for_no_heavy_module() -> None:
    program = (
        "import sys\n"
        "from expertstream_engine.cli.commands import app\n"
        "try:\n    app(['run', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'numba', 'gguf', 'tokenizers', 'expertstream'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "--expert-memory" in run.stdout


def test_what_a_failed_device_would_not_free_is_left_to_the_system() -> None:
    """A destructor that fails says so on stderr, whoever calls it; a model has hundreds."""
    program = """
from expertstream import MachineError
from expertstream_engine import session
from expertstream_engine.cli import main

class OnTheDevice:
    def __del__(self):
        raise RuntimeError("the device failed")

def failing(*_, **__):
    held = OnTheDevice()
    raise MachineError("the device failed")

session.load_resident = failing
main()
"""
    run = [sys.executable, "-c", program, "run", "--token-ids", "1", "-n", "1"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("error: the device failed\n")
