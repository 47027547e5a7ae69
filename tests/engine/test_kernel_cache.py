"""Kernels come from the cache of an earlier process, unless a file that they are made of has changed since."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import expertstream_engine

ENGINE = Path(expertstream_engine.__file__).parent

# Says how often a job runner and a weight kernel came from the cache.
HITS = """
from expertstream_engine.kernels import pool, registry, vector_ir
with pool.WorkerPool(1):
    pass
kernel = registry.compile_kernel("rows", "F32", vector_ir.VectorBuilder.flavour)
print(sum(pool._run.stats.cache_hits.values()), kernel.cache_hits)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the engine, without anything compiled."""
    left_out = shutil.ignore_patterns("__pycache__", "models", "cuda")
    shutil.copytree(ENGINE, tmp_path / "expertstream_engine", ignore=left_out)
    return tmp_path


def run(copy: Path, **environ: str) -> tuple[list[int], str]:
    """What a process that imports the copy says, and its standard error."""
    ended = subprocess.run(
        [sys.executable, "-B", "-c", HITS],
        env=os.environ | {"PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": str(copy / "cache")} | environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [int(count) for count in ended.stdout.split()], ended.stderr


@pytest.mark.parametrize(("changed", "still_cached"), [("native", [0, 1]), ("vector_ir", [0, 0])])
def test_a_kernel_is_compiled_again_when_a_file_that_it_is_made_of_changed(
    copy: Path, changed: str, still_cached: list[int]
) -> None:
    assert [run(copy)[0] for _ in range(2)] == [[0, 0], [1, 1]]
    with (copy / "expertstream_engine" / "kernels" / f"{changed}.py").open("a") as source:
        source.write("# another line\n")
    assert run(copy)[0] == still_cached


def test_where_nothing_can_be_written_kernels_are_compiled_without_a_cache_and_it_says_so_once(copy: Path) -> None:
    (copy / "expertstream_engine" / "kernels" / "__pycache__").touch()  # a file: not even root can write into that
    counts, errors = run(copy, NUMBA_CACHE_DIR="/dev/null/a", XDG_CACHE_HOME="/dev/null/b", HOME="/dev/null/c")
    assert counts == [0, 0]
    assert errors.count("compiled_code_not_cached") == errors.count("\n") == 1


def test_kernels_that_are_not_as_they_were_written_are_compiled_anew_and_replaced(copy: Path) -> None:
    assert run(copy) == ([0, 0], "")
    for entry in (copy / "cache").rglob("*.nbc"):
        entry.write_bytes(bytes(entry.stat().st_size))
    counts, errors = run(copy)
    assert counts == [0, 0]
    assert errors.count("compiled_code_not_loaded") == errors.count("\n") == 1
    assert run(copy) == ([1, 1], "")
