"""Runs with a host tier below the slots: the tokens of a run without, what the report tells, and what is refused."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from expertstream import ConfigError, HostTiering, MachineError, hookimpl
from expertstream.backends import GROUP
from expertstream_engine import DeviceMemory, open_model
from expertstream_engine.cli.commands import app
from suite_runs import BROKEN

PROMPT = list(range(100, 140))


@pytest.fixture(autouse=True)
def _tiered_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the installed backends, one with late copies and host slots, in ordinary memory."""
    monkeypatch.syspath_prepend(str(BROKEN))
    entry = metadata.EntryPoint("tiered", "expertstream_broken.sound_tiered", GROUP)
    real = metadata.entry_points

    def entry_points(**wanted: str) -> object:
        found = real(**wanted)
        return (*found, entry) if wanted.get("group") == GROUP else found

    monkeypatch.setattr(metadata, "entry_points", entry_points)


@pytest.fixture(scope="module")
def cpu_tokens() -> list[int]:
    with open_model(expert_memory="all", backend="cpu") as model:
        generation = model.generate(PROMPT, 16, ignore_eos=True)
        for _ in generation:
            pass
        return generation.tokens


@pytest.mark.parametrize("host_memory", ["all", "30%"])
@pytest.mark.parametrize("kind", ["inclusive", "exclusive"])
def test_a_host_tier_changes_no_token_and_its_figures_add_up(
    cpu_tokens: list[int], kind: HostTiering, host_memory: str
) -> None:
    with open_model(backend="tiered", expert_memory="25%", host_memory=host_memory, host_tier=kind) as model:
        model.wait_for_host_tier()
        for _ in range(2):
            generation = model.generate(PROMPT, 16, ignore_eos=True)
            for _ in generation:
                pass
            assert generation.tokens == cpu_tokens
        plan = model.planned.plan
    report = generation.report  # also after the model is closed
    assert report.host_slots == sum(planned.host_slot_count for planned in plan.classes)
    assert report.host_tiering == kind
    assert report.device_bytes == plan.expert_memory_bytes
    assert report.pinned_bytes == plan.staging_bytes + plan.host_memory_bytes
    assert model.device_memory == DeviceMemory(report.device_bytes, report.pinned_bytes)
    total = report.total
    assert 0 < total.host_hits <= total.misses
    assert total.h2d_bytes >= total.misses * min(planned.slot_bytes for planned in plan.classes)
    if host_memory == "all":
        assert total.host_hits == total.misses
        assert total.expert_bytes_read == 0


def test_the_commands_tell_of_the_tier() -> None:
    arguments = ["--backend", "tiered", "--expert-memory", "25%", "--host-memory", "50%"]
    planned = CliRunner().invoke(app, ["plan", *arguments])
    assert planned.exit_code == 0, planned.output
    assert "host slots for layer" in planned.stdout
    assert "staging buffers" in planned.stdout
    assert "total on the host" in planned.stdout
    run = ["run", "--token-ids", "1,2,3", "-n", "4", "--ignore-eos", *arguments]
    shown = CliRunner().invoke(app, run)
    assert shown.exit_code == 0, shown.output
    assert "exclusive host tier of" in shown.stderr
    told = json.loads(CliRunner().invoke(app, [*run, "--json"]).stdout)
    assert told["device_hits"] == told["hits"]
    assert {"host_hits", "h2d_bytes", "d2h_bytes", "device_bytes", "pinned_bytes", "disk_wait_s"} <= set(told)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--host-memory", "4GiB"], "host memory of 4GiB was asked for, but backend 'cpu' has no host tier"),
        (
            ["--host-tier", "inclusive"],
            "a host tier that is inclusive was asked for, but backend 'cpu' has no host tier",
        ),
        (["--host-tier", "both"], "'inclusive', 'exclusive'"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(arguments: list[str], reason: str) -> None:
    for command in ("plan", "run"):
        refused = CliRunner().invoke(app, [command, *arguments])
        assert refused.exit_code == 2
        assert reason in refused.stderr


def test_memory_that_the_backend_cannot_measure_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import expertstream_cpu

    def measure_store() -> object:
        raise MachineError("the driver does not say")

    monkeypatch.setattr(expertstream_cpu, "measure_store", hookimpl(measure_store), raising=False)
    with capture_logs() as events, open_model(backend="cpu") as model:
        generation = model.generate(PROMPT, 2, ignore_eos=True)
        for _ in generation:
            pass
    assert len(generation.tokens) == 2
    assert generation.report.pinned_bytes == 0
    assert {event["error"] for event in events if event["event"] == "memory_not_measured"} == {
        "the driver does not say"
    }


def test_no_tier_may_be_asked_for_where_there_is_none() -> None:
    with open_model(backend="cpu", host_memory="0") as model:
        assert model.streamer.host_tier is None
    with pytest.raises(ConfigError):
        open_model(backend="cpu", host_memory="1GiB")
