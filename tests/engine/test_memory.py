"""A run takes what its plan says, not what the model weighs."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertstream_engine.session as session
import model_files
from expertstream import Checkpoint, ResidentTensors, load_resident, resident_padding_bytes
from expertstream_engine import BUNDLED_MODEL, open_model
from expertstream_engine.ops.numba_ops import NumbaOps
from memory_pages import pages_in_memory

PLANNED_RUN = """
import json, sys
from expertstream import load_settings
from expertstream_engine import RunSettings
from expertstream_engine.demand import plan_run
from expertstream_engine.report import peak_rss_bytes
from expertstream_engine.session import Model

model, budget = sys.argv[1:]
settings = load_settings(RunSettings, file=None, environ={}, overrides={"expert_memory": budget, "threads": 2})
with Model(plan_run(__import__("pathlib").Path(model), settings), settings) as loaded:
    plan = loaded.planned.plan
    baseline = peak_rss_bytes()
    generation = loaded.generate(list(range(200)), 12, ignore_eos=True)
    for _ in generation:
        pass
    report = generation.report
print(json.dumps({
    "planned": plan.total_bytes, "resident": plan.demand.resident_bytes, "slots": plan.expert_memory_bytes,
    "loaded": baseline, "peak": report.peak_rss_bytes, "read": report.total.expert_bytes_read,
}))
"""
INTERPRETER = """
from expertstream_engine.ops.numba_ops import NumbaOps
from expertstream_engine.report import peak_rss_bytes
import expertstream_engine.session

with_kernels = NumbaOps(2)
with_kernels.prepare(["F32", "Q4_K", "Q8_0"], lambda name: None)
print(peak_rss_bytes())
"""
MIB = 1 << 20


def output_of(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_the_peak_stays_within_the_plan_and_the_interpreter(tmp_path: Path) -> None:
    model = model_files.write_sparse(tmp_path / "sparse-2GiB.gguf")
    assert model.stat().st_size > 1.6 * 1024 * MIB
    output_of(INTERPRETER)  # kernels compile once, and are taken from their cache from then on
    interpreter_bytes = int(output_of(INTERPRETER))
    figures = json.loads(output_of(PLANNED_RUN, str(model), "300MiB"))
    assert figures["slots"] <= 300 * MIB
    assert figures["read"] > figures["slots"]  # experts went through the slots, not only into them
    assert figures["peak"] > figures["resident"] + figures["slots"]  # or nothing was measured
    assert figures["peak"] <= figures["planned"] + interpreter_bytes + 64 * MIB, figures


TOKENS = [7, 8, 9]


@pytest.fixture
def host_weights(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where the weights of each model that is opened lie in host memory once they are read: address and bytes."""
    spans: list[tuple[int, int]] = []

    def load(checkpoint: Checkpoint, *arguments: Any, **options: Any) -> ResidentTensors:
        tensors = load_resident(checkpoint, *arguments, **options)
        begin = min(data.ctypes.data for data in tensors.values()) // mmap.PAGESIZE * mmap.PAGESIZE
        spans.append((begin, max(data.ctypes.data + data.nbytes for data in tensors.values()) - begin))
        return tensors

    monkeypatch.setattr(session, "load_resident", load)
    return spans


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system takes no part of a mapping back")
def test_weights_that_are_copied_to_a_device_are_in_memory_twice_one_tensor_at_a_time(
    monkeypatch: pytest.MonkeyPatch, host_weights: list[tuple[int, int]]
) -> None:
    """The host's pages and what was placed so far, whenever the next one is to be: together about the file's bytes."""
    placed: list[np.ndarray] = []
    held_bytes: list[int] = []

    def look() -> None:
        host_bytes = len(pages_in_memory(*host_weights[0])) * mmap.PAGESIZE
        held_bytes.append(host_bytes + sum(data.nbytes for data in placed))

    def place(ops: NumbaOps, data: np.ndarray) -> np.ndarray:
        look()
        placed.append(data.copy())
        return placed[-1]

    with open_model(BUNDLED_MODEL, expert_memory="25%") as model:
        expected = model.logits(TOKENS).tobytes()
    host_weights.clear()
    monkeypatch.setattr(NumbaOps, "place", place)
    with open_model(BUNDLED_MODEL, expert_memory="25%") as model:
        checkpoint = model.planned.checkpoint
        assert model.logits(TOKENS).tobytes() == expected
    all_bytes = sum(data.nbytes for data in placed)
    assert all_bytes == checkpoint.resident_bytes
    assert held_bytes[0] >= all_bytes  # or nothing was measured
    # Pages that a neighbour reaches into stay for it: two at most for each tensor that is left.
    shared_bytes = 2 * len(placed) * mmap.PAGESIZE
    assert max(held_bytes) <= all_bytes + resident_padding_bytes(checkpoint) + shared_bytes
    assert held_bytes[-1] <= all_bytes + 2 * mmap.PAGESIZE


def test_weights_that_are_computed_with_where_they_were_read_stay_there(host_weights: list[tuple[int, int]]) -> None:
    with open_model(BUNDLED_MODEL, expert_memory="25%") as model:
        (span,) = host_weights
        assert len(pages_in_memory(*span)) * mmap.PAGESIZE >= model.planned.checkpoint.resident_bytes
        assert model.logits(TOKENS).size
