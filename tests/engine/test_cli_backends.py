"""Backends on the command line: listed with what they need, chosen in order, told their options; nothing in silence."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import structlog
from attrs import frozen
from typer.testing import CliRunner, Result

import expertstream_cpu
from expertstream import BackendUnavailable, hookimpl
from expertstream_engine import BUNDLED_MODEL
from expertstream_engine.cli.commands import app


@frozen
class Options:
    """What the tests' backend may be told."""

    device: int = 0
    name: str = "front"


def _like_cpu() -> types.ModuleType:
    module = types.ModuleType("like_cpu")
    vars(module).update({name: value for name, value in vars(expertstream_cpu).items() if not name.startswith("__")})
    return module


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Options]]:
    """Beside the installed backends: `tunable`, which has options, `absent` and `broken`. Gives what it was told."""
    for name in [name for name in os.environ if name.startswith("EXPERTSTREAM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
    told: list[Options] = []

    def configure(options: Options) -> None:
        told.append(options)

    def host_memory_is_device_addressable() -> bool:
        raise BackendUnavailable("no driver is loaded")

    modules = {"tunable": _like_cpu(), "absent": _like_cpu(), "broken": types.ModuleType("empty")}
    vars(modules["tunable"])["configure"] = hookimpl(configure)
    vars(modules["absent"])["host_memory_is_device_addressable"] = hookimpl(host_memory_is_device_addressable)
    entries = [*metadata.entry_points(group="expertstream.backends")]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"offered_{name}", module)
        entries.append(metadata.EntryPoint(name, f"offered_{name}", "expertstream.backends"))
    monkeypatch.setattr(metadata, "entry_points", lambda **_: tuple(entries))
    yield told
    structlog.reset_defaults()


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def records(*arguments: str) -> dict[str, Any]:
    result = call("backends", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return {record["name"]: record for record in json.loads(result.stdout)}


@pytest.mark.usefixtures("configured")
def test_the_listing_shows_everything_of_each_and_no_broken_one_hides_another() -> None:
    listed = records()
    assert listed["cpu"]["usable"] is True
    assert listed["absent"]["problem"] == "no driver is loaded"
    assert "does not state the contract" in listed["broken"]["problem"]
    tunable = listed["tunable"]
    assert tunable["usable"] is True
    assert tunable["host_memory_is_device_addressable"] is True
    assert tunable["free_bytes"] > 0
    assert tunable["options"] == [
        {"key": "device", "type": "int", "default": "0"},
        {"key": "name", "type": "str", "default": "'front'"},
    ]
    table = " ".join(call("backends").stdout.split())
    assert "absent no driver is loaded" in table
    assert "tunable.device 0 int" in table


def test_options_for_the_listing_come_from_option_and_file(configured: list[Options], tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[backends.tunable]\nname = "back"\ndevice = 1\n')
    records("--config", str(file), "--backend-option", "tunable.device=2")
    assert configured == [Options(2, "back")]
    assert "known" in records("--backend-option", "tunable.devise=2")["tunable"]["problem"]


def test_a_run_is_planned_on_the_first_usable_backend_and_the_others_are_shown_with_the_reason(
    configured: list[Options],
) -> None:
    result = call(
        *("plan", BUNDLED_MODEL, "--json", "--backend", "absent,broken,tunable,cpu"),
        *("--backend-option", "tunable.device=3", "--backend-option", "tunable.name=x"),
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["backend"] == "tunable"
    assert configured == [Options(3, "x")]
    assert "backend_refused" in result.stderr
    assert "no driver is loaded" in result.stderr
    assert "does not state the contract" in result.stderr


def test_the_environment_selects_and_configures(configured: list[Options], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTSTREAM_BACKEND", "absent,tunable")
    monkeypatch.setenv("EXPERTSTREAM_BACKENDS__TUNABLE__DEVICE", "7")
    assert json.loads(call("plan", BUNDLED_MODEL, "--json").stdout)["backend"] == "tunable"
    assert configured == [Options(7)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "absent,broken"), "none of the backends named can be used:\n  absent: no driver is loaded\n"),
        (("--backend", "absent"), "error: no driver is loaded"),
        (("--backend-option", "tunable.device=1"), "backend 'tunable' is not selected; that is cpu"),
        (("--backend-option", "tunabel.device=1"), "no backend is called 'tunabel'"),
        (("--backend", "tunable", "--backend-option", "tunable.devise=1"), "did you mean 'device'?"),
        (("--backend", "tunable", "--backend-option", "device=1"), "--backend-option NAME.KEY=VALUE"),
    ],
)
@pytest.mark.usefixtures("configured")
def test_what_cannot_be_had_is_refused_before_anything_is_read(arguments: tuple[str, ...], message: str) -> None:
    result = call("plan", "no-such-model.gguf", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
