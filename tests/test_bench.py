"""The benchmark that compares placements of experts: its arms take turns, and it says on what it was run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "bench" / "gpu_decode.py"
SMALL = ["--layers", "2", "--experts", "64", "--hidden", "256", "--width", "256", "--context", "64", "--tokens", "4"]
ON_CPU = ["--backend", "cpu", "--arms", "all", "50%", "metal_compat:25%"]


def bench(model: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), str(model), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench") / "random.gguf"


def test_every_arm_has_its_turn_before_any_has_the_next(model: Path) -> None:
    done = bench(model, *ON_CPU, "--rounds", "3", "--commit", "of a test")
    *_, versions, memory, before, first, second, third, after = records(done)
    turns = [line.partition(": ")[0] for line in done.stderr.splitlines() if line.startswith("round ")]
    names = ["all", "50%", "metal_compat:25%"]
    assert turns == [f"round {number}, {name}" for number in (1, 2, 3) for name in names]
    assert [arm["arm"] for arm in (first, second, third)] == names
    assert [arm["backend"] for arm in (first, second, third)] == ["cpu", "cpu", "metal_compat"]
    assert versions["commit"] == "of a test"
    assert memory["memory"]["host_gb"] < memory["memory"]["host_available_gb"]
    assert set(before["gb_per_s"]) == set(after["gb_per_s"]) == {"1", "8"}
    for arm in (first, second, third):
        assert arm["rounds"] == 3
        assert arm["lowest"] <= arm["tokens_per_s"] <= arm["highest"]
        assert arm["io_mode"] in ("direct", "buffered")
        for middle, low, high in (arm["ms_per_token"], *arm["ms_split"].values()):
            assert low <= middle <= high
    assert (first["hit_rate"], first["mb_read_per_token"]) == (1, 0)
    assert second["hit_rate"] > third["hit_rate"] > 0
    assert third["mb_read_per_token"] > second["mb_read_per_token"] > 0


def test_no_round_begins_that_would_end_too_late(model: Path) -> None:
    done = bench(model, *ON_CPU, "--rounds", "3", "--limit-s", "0")
    assert [record["rounds"] for record in records(done) if "arm" in record] == [1, 1, 1]
    assert "no time is left for round 2" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--arms", "all/0/exclusive/3"], 2, r"is not [BACKEND:]SLOTS[/HOST[/KIND]]"),
        ([*ON_CPU, "--backend-option", "cuda_unified.mapped=true"], 2, "no arm is of the backend of cuda_unified"),
        ([*ON_CPU, "--rounds", "0"], 2, "at least 1 round"),
        (
            ["--backend", "cpu", "--arms", "1KiB"],
            1,
            "arm 1KiB: expert memory of 1KiB is 1024 bytes, and one step needs",
        ),
    ],
)
def test_arms_that_cannot_be_are_refused_before_any_is_opened(
    model: Path, arguments: list[str], code: int, reason: str
) -> None:
    done = bench(model, *arguments)
    assert done.returncode == code
    assert reason in done.stderr
    assert "is open" not in done.stderr
