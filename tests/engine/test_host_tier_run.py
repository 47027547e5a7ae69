"""Runs with a host tier below the slots: the tokens of a run without, what the report tells, and what is refused."""

from __future__ import annotations

import json
import threading
from importlib import metadata
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from expertstream import ConfigError, HostTiering, MachineError, hookimpl, host_tier, load_settings
from expertstream.backends import GROUP
from expertstream_engine import BUNDLED_MODEL, DeviceMemory, Model, RunSettings, open_model
from expertstream_engine.cli.commands import app
from expertstream_engine.cli.consoles import size_text
from expertstream_engine.cli.screen import Screen
from expertstream_engine.cli.summary import print_report, prompt_line, status_line
from expertstream_engine.demand import plan_run
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


class Gate:
    """Lets host slots be made until there are `slots` of them, one by one; the next one waits for it to open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
        from expertstream_broken.sound_tiered import Rows

        self.reached, self.is_open, self._left = threading.Event(), threading.Event(), slots
        self._real = Rows.allocated
        monkeypatch.setattr(host_tier, "PIECE_BYTES", 1)
        monkeypatch.setattr(Rows, "allocated", lambda rows, slot_count: self._allocated(rows, slot_count))

    def _allocated(self, rows: object, slot_count: int) -> object:
        if not self._left:
            self.reached.set()
            self.is_open.wait()
            return self._real(rows, slot_count)
        self._left -= 1
        return self._real(rows, slot_count)


@pytest.mark.parametrize("pinned", [0, 3])
def test_how_far_the_tier_has_grown_is_shown_from_loading_to_the_report(
    pinned: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hot = tmp_path / "hot.json"
    with open_model(backend="cpu") as model:
        list(model.generate(PROMPT, 1))
        model.save_hotlist(hot)
    gate = Gate(monkeypatch, pinned)
    options = {"backend": "tiered", "expert_memory": "25%", "host_memory": "all", "hotlist": hot}
    settings = load_settings(RunSettings, file=None, environ={}, overrides=options)
    planned = plan_run(BUNDLED_MODEL, settings)
    screen = Screen(shows_text=True)
    lines: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        if what == "kernel threads":
            assert gate.reached.wait(60)
        screen.progress(what, done, total)
        lines.append(screen._status())

    try:
        with Model(planned, settings, progress) as model:
            tier = model.streamer.host_tier
            assert tier is not None
            assert (tier.slot_count, tier.is_growing) == (pinned, True)
            pinning = f"host tier {size_text(tier.pinned_bytes)} of {size_text(planned.plan.host_memory_bytes)} pinned"
            for loading in ("preparing kernel", "loading weights: ", "loading hot experts: "):
                assert [line for line in lines if line.startswith(loading) and ", host tier " in line], loading
            assert all(line.endswith(f", {pinning}") for line in lines if line.startswith("loading hot experts: "))

            generation = model.generate(PROMPT, 2, ignore_eos=True)
            list(generation)
            report = generation.report
            assert report.host_tier_growing
            assert report.to_json()["host_tier_growing"] is True
            slots = f"{pinned} of {tier.planned_slots}"
            assert prompt_line(report, generation.prefill_steps).endswith(f", {slots} host slots pinned")
            assert f", {slots} host slots pinned, " in status_line(report, 2)
            print_report(report)
            shown = capsys.readouterr().err
            assert f"exclusive host tier, {slots} planned host slots pinned so far, pinned memory " in shown
            assert "the log says why" not in shown

            gate.is_open.set()
            model.wait_for_host_tier(progress)
            report = generation.report
            assert not report.host_tier_growing
            assert "host slots pinned" not in prompt_line(report, generation.prefill_steps) + status_line(report, 2)
            print_report(report)
            assert f"exclusive host tier of {tier.planned_slots} slots, pinned" in capsys.readouterr().err
    finally:
        gate.is_open.set()


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
