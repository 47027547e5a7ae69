"""Storage that fails under a run: it ends cleanly, says where, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from expertstream import CheckpointError, ReadFailed, open_checkpoint
from expertstream_engine import BUNDLED_MODEL, open_model

FAILING_RUN = """
import errno, os, sys, threading

real_preadv, routed_reads = os.preadv, 0
first_routed_byte, last_routed_byte, good_reads = map(int, sys.argv[1:4])

def preadv(descriptor, buffers, offset, *flags):
    global routed_reads
    if first_routed_byte <= offset <= last_routed_byte:
        routed_reads += 1
        if routed_reads > good_reads:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    return real_preadv(descriptor, buffers, offset, *flags)

os.preadv = preadv
sys.argv = ["expertstream", *sys.argv[4:]]
from expertstream_engine.cli import main
try:
    main()
except SystemExit as ending:
    alive = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    print("threads left:", alive, file=sys.stderr)
    raise
"""


def routed_range() -> tuple[int, int]:
    """From behind the last resident tensor in front of an expert to the last expert's end, of the last layer."""
    layer = open_checkpoint(BUNDLED_MODEL).layers[-1]
    part = layer.parts[0]
    return int(part.offsets[0]), int(part.offsets[-1])


@pytest.mark.parametrize("good_reads", [0, 3])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_run_whose_storage_fails_ends_with_the_place_and_no_thread(good_reads: int, options: list[str]) -> None:
    first, last = routed_range()
    arguments = ["run", "--token-ids", "1,2,3", "-n", "40", "--ignore-eos", "--expert-memory", "25%", *options]
    command = [sys.executable, "-c", FAILING_RUN, str(first), str(last), str(good_reads), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert re.search(rf"error: .*{re.escape(str(BUNDLED_MODEL))} at offset \d+, \d+ bytes wanted.*EIO", ended.stderr)
    assert "Traceback" not in ended.stderr
    assert "threads left: []" in ended.stderr
    if options:
        assert json.loads(ended.stdout)["finish"] == "failed"
    else:
        assert re.search(r"\d+ tokens? generated, ended by failure", ended.stderr)


OVERWRITTEN_RUN = """
import os, sys

real_preadv, routed_reads = os.preadv, 0
first_routed_byte, last_routed_byte, good_reads = map(int, sys.argv[1:4])
model = sys.argv[4]

def preadv(descriptor, buffers, offset, *flags):
    global routed_reads
    if first_routed_byte <= offset <= last_routed_byte:
        routed_reads += 1
        if routed_reads == good_reads:
            with open(model, "r+b") as file:
                file.seek(first_routed_byte)
                file.write(bytes(last_routed_byte - first_routed_byte))
    return real_preadv(descriptor, buffers, offset, *flags)

os.preadv = preadv
sys.argv = ["expertstream", "run", *sys.argv[4:]]
from expertstream_engine.cli import main
main()
"""


@pytest.mark.parametrize("good_reads", [1, 20])
def test_a_run_whose_file_is_written_to_ends_and_mixes_no_bytes(tmp_path: Path, good_reads: int) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(BUNDLED_MODEL, model)
    first, last = routed_range()
    arguments = ["--token-ids", "1,2,3", "-n", "40", "--ignore-eos", "--expert-memory", "25%", "--json"]

    def run(write_at: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", OVERWRITTEN_RUN, str(first), str(last), str(write_at), str(model), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    expected, ended = run(0), run(good_reads)
    assert expected.returncode == 0
    assert ended.returncode not in (0, 130)
    assert re.search(rf"error: {re.escape(str(model))}: it was written to since its header was read", ended.stderr)
    assert "Traceback" not in ended.stderr
    record = json.loads(ended.stdout)
    assert record["finish"] == "failed"
    assert bool(record["tokens"]) == (good_reads > 1), "this many reads are not of the prompt alone"
    assert record["tokens"] == json.loads(expected.stdout)["tokens"][: len(record["tokens"])]


def test_weights_that_never_arrive_are_given_up_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    real_preadv, ends = os.preadv, threading.Event()
    first, _ = routed_range()

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if threading.current_thread().name.startswith("filler-") and offset < first:
            readers.add(threading.current_thread().name)
            ends.wait(60)
        return real_preadv(descriptor, buffers, offset)

    readers: set[str] = set()
    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ReadFailed, match=rf"reading {re.escape(str(BUNDLED_MODEL))} at offset .* was given up"):
        open_model(BUNDLED_MODEL, read_timeout_s=1, filler_threads=1)
    ends.set()
    assert readers == {"filler-0"}


def test_a_model_goes_on_after_a_read_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    real_preadv = os.preadv
    first, last = routed_range()
    broken = False

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if broken and first <= offset <= last:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    before = set(threading.enumerate())
    with open_model(expert_memory="25%") as model:
        whole = list(model.generate([5, 6, 7], 12, ignore_eos=True))
        broken = True
        for _ in range(3):
            with pytest.raises(ReadFailed, match="EIO"):
                list(model.generate([50, 60, 70, 80, 90], 40, ignore_eos=True))
        broken = False
        assert list(model.generate([5, 6, 7], 12, ignore_eos=True)) == whole
    assert set(threading.enumerate()) <= before


def test_a_file_that_shrinks_while_it_runs_is_an_error_and_not_garbage(tmp_path: Path) -> None:
    copy = tmp_path / "shrinks.gguf"
    copy.write_bytes(BUNDLED_MODEL.read_bytes())
    with open_model(copy, expert_memory="25%") as model:
        os.truncate(copy, routed_range()[0] + 1000)
        # Which one depends on the part that is read first: the one before the new end, or the one after it.
        with pytest.raises(
            (ReadFailed, CheckpointError), match=rf"{copy.name}.*(the file ends there|it was written to since)"
        ):
            list(model.generate([5, 6, 7], 60, ignore_eos=True))
