"""Code compiled by an earlier process is used again if its sources are unchanged, and never if one of them changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import expertstream

SOURCES = Path(expertstream.__file__).parent

# Leases an expert that does not exist, and says what the compiled step answers and how often it came from the cache.
STEP = """
import sys
import numpy as np
from expertstream.policies import make_policy
from expertstream.residency import make_tables
policy, tables = make_policy(sys.argv[1], 1), make_tables(1, 1, np.array([[0, 1]]))
one, found = np.ones(1, np.int64), np.zeros(1, np.uint8)
answer = policy.layer_step(tables, policy.ranks, 0, one, one.copy(), one.copy(), found)
print(answer, sum(policy.layer_step.stats.cache_hits.values()))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the core, without anything compiled."""
    shutil.copytree(SOURCES, tmp_path / "expertstream", ignore=shutil.ignore_patterns("__pycache__", "conformance"))
    return tmp_path


def run(copy: Path, code: str, *arguments: str, **environ: str) -> tuple[str, str]:
    """Standard output and error of a process that imports the copy."""
    ended = subprocess.run(
        [sys.executable, "-B", "-c", code, *arguments],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": str(copy / "cache")} | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip(), ended.stderr


@pytest.mark.parametrize("policy", ["hotness", "lru"])
def test_a_policy_compiled_with_an_older_residency_is_compiled_again(copy: Path, policy: str) -> None:
    assert [run(copy, STEP, policy)[0] for _ in range(2)] == ["-2 0", "-2 1"]
    residency = copy / "expertstream" / "residency.py"
    source = residency.read_text()
    residency.write_text(source.replace("EXHAUSTED, OUT_OF_RANGE = -1, -2", "EXHAUSTED, OUT_OF_RANGE = -1, -77"))
    assert residency.read_text() != source
    assert run(copy, STEP, policy)[0] == "-77 0"


def test_where_nothing_can_be_written_it_works_without_a_cache_and_says_so_once(copy: Path) -> None:
    for folder in [copy / "expertstream", *(path for path in (copy / "expertstream").rglob("*") if path.is_dir())]:
        (folder / "__pycache__").touch()  # a file, because not even root can write into that as if it were a folder
    output, errors = run(
        copy, STEP, "lru", NUMBA_CACHE_DIR="/dev/null/a", XDG_CACHE_HOME="/dev/null/b", HOME="/dev/null/c"
    )
    assert output == "-2 0"
    assert errors.count("compiled_code_not_cached") == errors.count("\n") == 1
