"""Code compiled by an earlier process is used again if its sources are unchanged, and never if one of them changed.

What cannot be read back as it was written, or cannot be written, costs the time of compiling, and ends no run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
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


def entries(copy: Path) -> list[Path]:
    return sorted((copy / "cache").rglob("*.nbc"))


def halved(entry: Path, _other: Path) -> None:
    entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])


def with_a_bit_flipped(entry: Path, _other: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[len(content) * 3 // 4] ^= 4  # amid machine code, which unpickles as well as ever
    entry.write_bytes(content)


def swapped(entry: Path, other: Path) -> None:
    content = entry.read_bytes()
    entry.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "empty": lambda entry, _: entry.write_bytes(b""),
    "zeros": lambda entry, _: entry.write_bytes(bytes(entry.stat().st_size)),
    "halved": halved,
    "with a bit flipped": with_a_bit_flipped,
    "swapped": swapped,
}


def warnings(errors: str) -> list[str]:
    return [line.split()[0] for line in errors.splitlines()]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_as_it_was_written_is_compiled_anew_and_replaced(copy: Path, damage: str) -> None:
    assert run(copy, STEP, "lru") == ("-2 0", "")
    written = entries(copy)
    [step] = [entry for entry in written if "layer_step" in entry.name]
    DAMAGES[damage](step, next(entry for entry in written if entry != step))
    output, errors = run(copy, STEP, "lru")
    assert output == "-2 0"
    assert warnings(errors) == ["compiled_code_not_loaded"]
    assert f"path={str(step)!r}" in errors
    assert run(copy, STEP, "lru") == ("-2 1", "")
    assert entries(copy) == written


def test_however_much_is_damaged_it_is_said_once(copy: Path) -> None:
    run(copy, STEP, "lru")
    for entry in entries(copy):
        entry.write_bytes(b"")
    output, errors = run(copy, STEP, "lru")
    assert (output, warnings(errors)) == ("-2 0", ["compiled_code_not_loaded"])
    assert run(copy, STEP, "lru") == ("-2 1", "")


def test_a_folder_in_the_way_of_an_entry_is_left_and_said(copy: Path) -> None:
    run(copy, STEP, "lru")
    [step] = [entry for entry in entries(copy) if "layer_step" in entry.name]
    step.unlink()
    step.mkdir()
    output, errors = run(copy, STEP, "lru")
    assert output == "-2 0"
    assert warnings(errors) == ["compiled_code_not_loaded", "compiled_code_not_cached"]
    assert f"folder={str(step.parent)!r}" in errors
    assert "NUMBA_CACHE_DIR" in errors
    assert not list(step.parent.glob("*.tmp.*"))


def test_where_there_is_no_room_it_works_without_a_cache_and_says_so_once(copy: Path) -> None:
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n" + STEP
    output, errors = run(copy, limited, "lru")
    assert output == "-2 0"
    assert warnings(errors) == ["compiled_code_not_cached"]
    assert str(copy / "cache") in errors
    assert not [path for path in (copy / "cache").rglob("*") if path.is_file()]


def test_with_a_numba_made_otherwise_its_own_cache_works_and_ends_no_run(copy: Path) -> None:
    otherwise = "import numba.core.serialize as s, numba.core.caching as c\n"
    otherwise += "del c.IndexDataCacheFile._dump\n"  # and what used it says it in other words
    otherwise += "def save(self, name, data):\n open(self._data_path(name), 'wb').write(s.dumps(data))\n"
    otherwise += "def index(self, overloads):\n open(self._index_path, 'wb').write("
    otherwise += "s.dumps(self._version) + s.dumps((self._source_stamp, overloads)))\n"
    otherwise += "c.IndexDataCacheFile._save_data, c.IndexDataCacheFile._save_index = save, index\n"
    assert [run(copy, otherwise + STEP, "lru") for _ in range(2)] == [("-2 0", ""), ("-2 1", "")]
    for entry in entries(copy):
        entry.write_bytes(b"")
    output, errors = run(copy, otherwise + STEP, "lru")
    assert (output, warnings(errors)) == ("-2 0", ["compiled_code_not_loaded"])
    assert run(copy, otherwise + STEP, "lru") == ("-2 1", "")
