"""The command line as a process: streams, pipes, signals and what is left when it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

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


def test_text_comes_while_it_is_generated_and_ctrl_c_ends_it_with_a_report() -> None:
    process = start(ENDLESS)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert len(first) == 1
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert int(re.findall(r"tokens generated: (\d+), ended by interruption", err)[0]) < 500
    assert rest.endswith("\n")


def test_ctrl_c_with_json_leaves_stdout_empty() -> None:
    process = start((*ENDLESS, "--json", "--verbose"))
    assert process.stderr is not None
    assert any("slot_store_allocated" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in err


@pytest.mark.parametrize("arguments", [ENDLESS, ("backends",)])
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
        "from expertstream_engine.cli import app\n"
        "try:\n    app(['run', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'numba', 'gguf', 'tokenizers', 'expertstream'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "--expert-memory" in run.stdout
