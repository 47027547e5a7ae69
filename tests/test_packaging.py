"""What is built is complete: the wheel runs from a folder of its own, and the source archive builds and tests it."""

from __future__ import annotations

import configparser
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(
    path.parent for pattern in ("core/*", "plugins/*/*", "engine/*") for path in ROOT.glob(f"{pattern}/__init__.py")
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, as it would lie in site-packages."""
    folder = tmp_path_factory.mktemp("unpacked")
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_the_wheel_has_every_file_of_every_package(unpacked: Path, package: Path) -> None:
    files = {
        path.relative_to(package.parent)
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {path.relative_to(unpacked) for path in (unpacked / package.name).rglob("*") if path.is_file()}
    assert packed == files
    assert Path(package.name, "py.typed") in packed


def test_the_wheel_has_the_bundled_model(unpacked: Path) -> None:
    name = "expertstream_engine/models/tiny15m-q4_k_m.gguf"
    assert (unpacked / name).read_bytes() == (ROOT / "engine" / name).read_bytes()


def test_the_wheel_offers_the_commands_and_the_backends(unpacked: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    offered = configparser.ConfigParser(delimiters="=", interpolation=None)
    offered.read(next(unpacked.glob("*.dist-info/entry_points.txt")))
    assert {group: dict(offered[group]) for group in offered.sections()} == {
        "console_scripts": project["scripts"],
        **project["entry-points"],
    }


def test_the_wheel_is_imported_from_where_it_lies(unpacked: Path) -> None:
    names = ["expertstream", "expertstream.conformance", "expertstream_cpu", "expertstream_engine.cli"]
    code = (
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(unpacked)!r})\n"
        f"print(*(importlib.import_module(name).__file__ for name in {names!r}), sep='\\n')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=unpacked, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    files = [Path(line) for line in ended.stdout.splitlines()]
    assert [path.is_relative_to(unpacked) for path in files] == [True] * len(names), files


def test_the_source_archive_has_what_the_check_needs(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        names = {name.partition("/")[2] for name in members.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", ".ci/run"} <= names
    assert {f"tests/{path.name}" for path in (ROOT / "tests").glob("*.py")} <= names
    assert "tests/data/tiny15m-q8_0.gguf" in names
