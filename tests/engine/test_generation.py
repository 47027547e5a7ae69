"""What a generation tells of itself: counters and times of its phases, also of one that was broken off."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray
from structlog.testing import capture_logs

import expertstream_cpu
import model_files
from expertstream import (
    ConfigError,
    MachineError,
    MemoryRequest,
    SlotStore,
    StoreMemory,
    UsageError,
    hookimpl,
)
from expertstream.filler import Filler
from expertstream_engine import BUNDLED_MODEL, Model, RunSettings, open_model, session
from expertstream_engine.cli.consoles import size_text
from expertstream_engine.cli.summary import print_report, prompt_line
from expertstream_engine.demand import plan_run
from expertstream_engine.model import MoeModel
from expertstream_engine.sampling import LogitsNotFinite, Sampler

LAYERS, PROMPT = 4, (5, 6, 7)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with open_model(expert_memory="25%", context=64) as opened:
        yield opened


class BrokenOff(BaseException):
    """Ends a generation as Ctrl-C does, and a test that does not expect it as an error."""


def on_route(monkeypatch: pytest.MonkeyPatch, hook: Any) -> None:
    real = MoeModel._route

    def route(self: MoeModel, block: int, *arguments: Any) -> Any:
        hook(block)
        return real(self, block, *arguments)

    monkeypatch.setattr(MoeModel, "_route", route)


def test_times_are_those_of_passes_and_choice_and_not_the_consumers(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def a_layer(_: int) -> None:
        clock.now += 1

    real = Sampler.next

    def choose(self: Sampler, logits: NDArray[np.float32], recent: Sequence[int]) -> int:
        clock.now += 10
        return real(self, logits, recent)

    on_route(monkeypatch, a_layer)
    monkeypatch.setattr(Sampler, "next", choose)
    generation = model.generate(PROMPT, 3, ignore_eos=True)
    for _ in generation:
        clock.now += 1000
    assert generation.report.prefill_seconds == LAYERS + 10
    assert generation.report.decode_seconds == 2 * (LAYERS + 10)
    assert generation.report.decode_tokens_per_second == 1 / (LAYERS + 10)


@pytest.mark.parametrize(("broken_off_at", "phase"), [(2, "prefill"), (LAYERS + 2, "decode")])
def test_a_phase_that_is_broken_off_has_what_it_cost_until_then(
    broken_off_at: int, phase: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = 0

    def interrupt(_: int) -> None:
        nonlocal done
        done += 1
        if done == broken_off_at + 1:
            raise BrokenOff

    on_route(monkeypatch, interrupt)
    generation = model.generate(PROMPT, 8, ignore_eos=True)
    with pytest.raises(BrokenOff):
        list(generation)
    report = generation.report
    assert report.finish == "interrupted"
    assert getattr(report, phase).steps == broken_off_at % LAYERS
    assert getattr(report, f"{phase}_seconds") > 0
    assert report.total.steps == broken_off_at
    assert report.decode_passes == 0
    list(model.generate(PROMPT, 1))
    assert generation.report.total == report.total, "a later generation is not counted in"


def test_how_far_the_prompt_is_can_be_asked_while_it_is_read(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LARGEST_BATCH_TOKENS", 2)
    lines: list[str] = []
    on_route(monkeypatch, lambda _: lines.append(prompt_line(generation.report, generation.prefill_steps)))
    generation = model.generate(PROMPT, 1)
    list(generation)
    steps = 2 * LAYERS
    assert len(lines) == steps == generation.report.prefill.steps
    for done, line in enumerate(lines):
        assert line.startswith(f"reading the prompt of 3 tokens: layer {done} of {steps}, ")
        assert "of experts read at " in line


def test_the_sampler_sees_prompt_and_answer_so_far(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    real = Sampler.next

    def choose(self: Sampler, logits: NDArray[np.float32], recent: Sequence[int]) -> int:
        seen.append(tuple(recent))
        return real(self, logits, recent)

    monkeypatch.setattr(Sampler, "next", choose)
    generation = model.generate(PROMPT, 4, ignore_eos=True)
    list(generation)
    assert seen == [(*PROMPT, *generation.tokens[:number]) for number in range(4)]


def test_logits_of_a_prompt_in_one_batch_are_not_copied(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[NDArray[np.float32]] = []
    real = MoeModel.forward

    def forward(self: MoeModel, *arguments: Any, **options: Any) -> NDArray[np.float32]:
        made.append(real(self, *arguments, **options))
        return made[-1]

    monkeypatch.setattr(MoeModel, "forward", forward)
    assert model.logits(PROMPT, all_positions=True) is made[-1]
    monkeypatch.setattr(session, "LARGEST_BATCH_TOKENS", 2)
    whole = made[-1]
    assert model.logits(PROMPT, all_positions=True).shape == whole.shape
    assert len(made) == 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("part_name", model_files.DAMAGED_PARTS)
def test_damaged_weights_are_told_with_their_file(part_name: str, value: float, tmp_path: Path) -> None:
    path = model_files.write_damaged(tmp_path / "damaged.gguf", part_name, value)
    with open_model(path) as damaged, pytest.raises(LogitsNotFinite) as refusal:
        list(damaged.generate([1, 2], 4))
    assert re.search(r"after 2 tokens .*damaged\.gguf: .*checksums", refusal.value.__notes__[0])


def test_damaged_weights_are_told_where_activations_are_rounded_to_q8_0(tmp_path: Path) -> None:
    path = model_files.write_damaged(tmp_path / "damaged.gguf", "up", np.nan, model_files.TINY_Q8_0)
    with open_model(path) as damaged, pytest.raises(LogitsNotFinite):
        list(damaged.generate([1, 2], 4))


def test_a_close_that_fails_hides_nothing_that_went_wrong_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(model: Model) -> None:
        close(model)
        raise MachineError("nor can it be closed")

    close = Model.close
    monkeypatch.setattr(Model, "close", failing)
    with capture_logs() as events, pytest.raises(UsageError, match="the first"), open_model(BUNDLED_MODEL):
        raise UsageError("the first")
    assert {"event": "close_failed", "error": "nor can it be closed", "log_level": "warning"} in events
    with pytest.raises(MachineError, match="nor can it"), open_model(BUNDLED_MODEL):
        pass


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(ConfigError, match="path is empty"):
        open_model("")


def test_letting_go_of_a_generation_is_enough_for_the_next_one() -> None:
    with open_model() as model:
        for _piece in model.generate([5, 6, 7], 40):
            break
        assert len(list(model.generate([5, 6, 7], 4, ignore_eos=True))) >= 4
        held = model.generate([5, 6, 7], 40)
        next(held)
        with pytest.raises(UsageError, match="exhaust or close"):
            next(model.generate([5, 6, 7], 4))
        held.close()


@pytest.mark.parametrize(("owner", "method"), [(Model, "_measured"), (Filler, "close")])
def test_a_close_that_is_interrupted_can_be_made_again(
    owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    model = open_model(expert_memory="25%")
    with monkeypatch.context() as patched:
        patched.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.close()
    model.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(UsageError, match="closed"):
        model.generate("In the beginning").__next__()


def test_a_model_closed_by_another_thread_ends_the_generation_and_does_not_hang() -> None:
    for _ in range(5):
        model = open_model(expert_memory="25%")
        generation = model.generate([5, 6, 7], 400, ignore_eos=True)
        next(generation)
        closing = threading.Thread(target=model.close)
        with pytest.raises(UsageError, match="closed while it was generating"):  # noqa: PT012  # whichever pass it meets
            closing.start()
            for _piece in generation:
                pass
        closing.join(60)
        assert not closing.is_alive()


@pytest.mark.parametrize("on_device", [False, True])
def test_hits_are_a_devices_where_one_computes_also_in_memory_that_is_the_hosts(
    on_device: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_store(store: SlotStore) -> StoreMemory:
        return StoreMemory(store.slot_count * store.layout.slot_bytes, 3 << 20)

    monkeypatch.setattr(expertstream_cpu, "measure_store", hookimpl(measure_store), raising=False)
    settings = RunSettings(expert_memory=MemoryRequest.parse("25%"))
    planned = plan_run(BUNDLED_MODEL, settings)
    demand = evolve(planned.plan.demand, on_device=on_device)
    with Model(evolve(planned, plan=evolve(planned.plan, demand=demand)), settings) as opened:
        generation = opened.generate(PROMPT, 8, ignore_eos=True)
        for _ in generation:
            pass
        report = generation.report
    told = report.to_json()
    assert told["hits"] > 0
    assert told["device_hits"] == (told["hits"] if on_device else 0)
    assert told["device_bytes"] == 0
    pinned_bytes = len(planned.plan.classes) * (3 << 20)
    assert told["pinned_bytes"] == pinned_bytes
    print_report(report)
    pinned = f"reads slots in {size_text(pinned_bytes)} of pinned host memory"
    assert (pinned in capsys.readouterr().err) == on_device
