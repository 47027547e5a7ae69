"""A run takes what its plan says, not what the model weighs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import model_files

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
