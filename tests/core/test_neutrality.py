"""The core names no platform, no device and no model architecture: not in code, comments, names or tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PLATFORMS_AND_DEVICES = """
c.uda c.upy n.vidia m.etal a.pple r.ocm h.ip v.ulkan g.eforce o.pencl m.ps d.arwin l.inux w.indows g.b10 h.200 a.100
m.lx s.ycl x.86 a.rm64 a.arch64 a.vx a.vx2 a.vx512 n.eon m.acos
"""
ARCHITECTURES = "q.wen q.wen3moe o.lmoe m.ixtral l.lama d.eepseek g.pt-oss g.ptoss g.rok g.ranite p.hi"
WORDS = (PLATFORMS_AND_DEVICES + ARCHITECTURES).replace(".", "").split()  # the dots keep this file from finding itself
FORBIDDEN = re.compile(rf"(?<![a-z])({'|'.join(WORDS)})(?![a-z])", re.IGNORECASE)
CORE = sorted(
    path
    for folder in (ROOT / "core", ROOT / "tests" / "core")
    for path in folder.rglob("*")
    if path.suffix in {".py", ".md", ".toml"} and path != Path(__file__)
)


def test_there_is_a_core_to_look_at() -> None:
    assert ROOT / "core" / "expertstream" / "streamer.py" in CORE


@pytest.mark.parametrize("word", ["cuda", "CUDA", "is_cuda_here", "Metal", "qwen3moe", "llama.cpp", "linux", "x86_64"])
def test_the_check_finds_what_it_looks_for(word: str) -> None:
    assert FORBIDDEN.search(f"x = {word!r}")


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_names_no_platform_device_or_architecture(path: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := FORBIDDEN.search(line))
    ]
    assert not found
