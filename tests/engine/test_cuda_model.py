"""Whole models on a CUDA device: the CPU's tokens, and the same bits whatever the slots; in Python and as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import field, frozen
from structlog.testing import capture_logs

import model_files
from expertstream import BackendOption, BudgetTooSmall, open_checkpoint, smallest_expert_memory_bytes
from expertstream_cuda.device import _devices
from expertstream_engine import BUNDLED_MODEL, open_model
from expertstream_engine.architecture import FAMILIES
from expertstream_engine.report import rss_bytes
from expertstream_engine.sampling import LogitsNotFinite
from gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

DISCRETE: dict[str, Any] = {"backend": "cuda_discrete"}
MAPPED: dict[str, Any] = {"backend": "cuda_unified", "backends": (BackendOption("cuda_unified", "mapped", True),)}
BACKENDS = {"discrete": DISCRETE, "mapped": MAPPED}
OPTIONS = {
    "discrete": ["--backend", "cuda_discrete"],
    "mapped": ["--backend", "cuda_unified", "--backend-option", "cuda_unified.mapped=true"],
}
BUDGETS = ["all", "50%", "25%", "smallest"]
PROMPTS = [np.random.default_rng(length).integers(1, 4096, length).tolist() for length in (1, 24, 300)]
CLEAR = 1e-3  # between the two best logits

COMMAND = "from expertstream_engine.cli import main; main()"
PATIENCE_S = 120

Answer = list[tuple[bytes, bytes, tuple[int, ...]]]


def answer(path: Path, **options: Any) -> Answer:
    """For each prompt the bytes of all its logits, of the last ones alone, and 24 greedy tokens."""
    answers = []
    with open_model(path, **options) as model:
        for prompt in PROMPTS:
            generation = model.generate(prompt, 24, ignore_eos=True)
            for _ in generation:
                pass
            everywhere = model.logits(prompt, all_positions=True)
            answers.append((everywhere.tobytes(), model.logits(prompt).tobytes(), tuple(generation.tokens)))
    return answers


@pytest.fixture(scope="module")
def resident() -> Answer:
    return answer(BUNDLED_MODEL, expert_memory="all", **DISCRETE)


def expert_memory(path: Path, budget: str) -> str:
    """The budget as `expert_memory` takes it, for the model at `path`."""
    return str(smallest_expert_memory_bytes(open_checkpoint(path))) if budget == "smallest" else budget


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_smallest_budget_is_what_a_refusal_names(backend: str) -> None:
    with pytest.raises(BudgetTooSmall) as refusal:
        open_model(BUNDLED_MODEL, expert_memory="1", **BACKENDS[backend])
    assert str(refusal.value.smallest_bytes) == expert_memory(BUNDLED_MODEL, "smallest")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_budget_and_backend_change_no_bit(resident: Answer, budget: str, backend: str) -> None:
    memory = expert_memory(BUNDLED_MODEL, budget)
    assert answer(BUNDLED_MODEL, expert_memory=memory, **BACKENDS[backend]) == resident


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_device_of_the_same_kind_gives_the_same_bits(resident: Answer, backend: str) -> None:
    devices = [device.name for device, _ in _devices()]
    if len(devices) < 2 or devices[1] != devices[0]:
        pytest.skip(f"two CUDA devices of one kind are needed; there are {', '.join(devices)}")
    chosen = BACKENDS[backend]
    on_the_second = BackendOption(chosen["backend"], "device", "1")
    options = chosen | {"backends": (*chosen.get("backends", ()), on_the_second)}
    with capture_logs() as events:
        assert answer(BUNDLED_MODEL, expert_memory="25%", **options) == resident
    chosen_events = [event for event in events if event["event"] == "cuda_device_chosen"]
    assert [(event["device"], event["of"]) for event in chosen_events] in ([], [(1, len(devices))])  # once a process


@pytest.mark.parametrize(
    ("host_memory", "host_tier"),
    [("all", "inclusive"), ("all", "exclusive"), ("40%", "inclusive"), ("40%", "exclusive"), ("0", None)],
)
@pytest.mark.parametrize("budget", ["50%", "25%", "smallest"])
def test_a_host_tier_changes_no_bit(resident: Answer, budget: str, host_memory: str, host_tier: str | None) -> None:
    """Also while it grows: nothing waits for it."""
    memory = expert_memory(BUNDLED_MODEL, budget)
    kind = {} if host_tier is None else {"host_tier": host_tier}
    assert answer(BUNDLED_MODEL, expert_memory=memory, host_memory=host_memory, **kind, **DISCRETE) == resident


@pytest.mark.parametrize("host_tier", ["inclusive", "exclusive"])
def test_a_miss_that_the_host_tier_answers_costs_no_read(host_tier: str) -> None:
    """One that the file answers fills an inclusive tier: the second text reads nothing, and no expert is read twice."""
    with open_model(BUNDLED_MODEL, expert_memory="25%", host_memory="all", host_tier=host_tier, **DISCRETE) as model:
        model.wait_for_host_tier()
        reports = []
        for _ in range(2):
            generation = model.generate(PROMPTS[2], 24, ignore_eos=True)
            for _ in generation:
                pass
            reports.append(generation.report)
        first, second = (report.total for report in reports)
        assert first.expert_bytes_read <= model.planned.plan.routed_bytes
        assert second.expert_bytes_read == 0
        assert second.host_hits == second.misses > 0
        slot_bytes = model.planned.plan.classes[0].slot_bytes
        assert first.h2d_bytes >= first.misses * slot_bytes > 0
        assert reports[1].pinned_bytes >= model.planned.plan.host_memory_bytes
        assert reports[1].host_slots == sum(planned.host_slot_count for planned in model.planned.plan.classes)


@pytest.mark.parametrize("budget", ["all", "25%"])
def test_the_device_holds_what_was_planned(budget: str) -> None:
    """After the longest batch that a prompt goes through in, and some decoding."""
    with open_model(BUNDLED_MODEL, expert_memory=budget, host_memory="0", **DISCRETE) as model:
        longest = model.context_tokens - 24
        generation = model.generate(np.random.default_rng(1).integers(1, 4096, longest).tolist(), 24, ignore_eos=True)
        for _ in generation:
            pass
        report, plan = generation.report, model.planned.plan
        least = plan.expert_memory_bytes + plan.demand.resident_bytes + plan.demand.kv_cache_bytes
        more_than_planned = report.device_bytes - report.planned_device_bytes  # arrays take whole 512 bytes
        assert least < report.planned_device_bytes
        assert 0 <= more_than_planned < 1 << 20
        assert 0 < report.pinned_bytes <= plan.staging_bytes


@pytest.mark.parametrize("hidden", [2048, 4096])
def test_the_driver_counts_what_was_planned(hidden: int, tmp_path: Path) -> None:
    """Everything that the model has taken of the device: also what is lost to pages of 2 MiB that are filled in part.

    Each of these weights on its own would waste 130 MiB of pages, and the wider ones 160.
    """
    from cupy.cuda import runtime

    path = model_files.write_sparse(tmp_path / "deep.gguf", blocks=24, experts=8, width=256, hidden=hidden)
    before_bytes, _ = runtime.memGetInfo()
    with open_model(path, expert_memory="all", host_memory="0", context=256, **DISCRETE) as model:
        for _ in model.generate(list(range(1, 200)), 24, ignore_eos=True):
            pass
        after_bytes, _ = runtime.memGetInfo()
        planned_bytes = model.planned.plan.device_bytes
    assert planned_bytes <= before_bytes - after_bytes < planned_bytes + max(planned_bytes // 100, 32 << 20)


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_files.write_dequantized(model_files.TINY_Q8_0, tmp_path_factory.mktemp("f32") / "tiny15m-f32.gguf")


@frozen(eq=False)
class CpuText:
    """What the CPU makes of a prompt: `tokens` are the prompt's and 64 more, each the likeliest of the `logits`."""

    tokens: list[int]
    prompt_length: int
    logits: np.ndarray = field(repr=False)  # at each position but the last

    @property
    def is_clear(self) -> np.ndarray:
        """Where the best two logits are far enough apart for every order of summation to agree."""
        best_two = np.sort(self.logits, axis=1)[:, -2:]
        return np.asarray(best_two[:, 1] - best_two[:, 0] >= CLEAR)

    def agrees(self, generated: Sequence[int]) -> bool:
        """Whether these are the tokens after the prompt, as far as each was clear."""
        clear = self.is_clear[self.prompt_length - 1 :]
        certain = next(iter(np.flatnonzero(~clear).tolist()), clear.size)
        expected = self.tokens[self.prompt_length :]
        return len(generated) == len(expected) and list(generated[:certain]) == expected[:certain]


@pytest.fixture(scope="module")
def cpu_texts(exact_model: Path) -> list[CpuText]:
    texts = []
    with open_model(exact_model, expert_memory="all", backend="cpu") as model:
        for prompt in PROMPTS:
            generation = model.generate(prompt, 64, ignore_eos=True)
            for _ in generation:
                pass
            text = [*prompt, *generation.tokens]
            texts.append(CpuText(text, len(prompt), model.logits(text[:-1], all_positions=True)))
    return texts


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exact_file_gives_the_cpus_tokens(
    exact_model: Path, cpu_texts: list[CpuText], budget: str, backend: str
) -> None:
    memory = expert_memory(exact_model, budget)
    with open_model(exact_model, expert_memory=memory, **BACKENDS[backend]) as model:
        for text in cpu_texts:
            logits = model.logits(text.tokens[:-1], all_positions=True)
            np.testing.assert_allclose(logits, text.logits, rtol=0, atol=1e-3)
            clear = text.is_clear
            np.testing.assert_array_equal(logits.argmax(1)[clear], text.logits.argmax(1)[clear])
            generation = model.generate(text.tokens[: text.prompt_length], 64, ignore_eos=True)
            for _ in generation:
                pass
            assert text.agrees(generation.tokens)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_each_architecture_gives_the_cpus_logits_and_the_same_bits_at_every_budget(
    architecture: str, tmp_path: Path
) -> None:
    path = model_files.write_random(architecture, tmp_path / "random.gguf")
    tokens = np.random.default_rng(5).integers(1, 300, 40).tolist()
    with open_model(path, expert_memory="50%", backend="cpu") as model:
        expected = model.logits(tokens, all_positions=True)
    found = []
    for backend in BACKENDS.values():
        for budget in BUDGETS:
            with open_model(path, expert_memory=expert_memory(path, budget), **backend) as model:
                found.append(model.logits(tokens, all_positions=True))
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-3)
    assert len({logits.tobytes() for logits in found}) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("part_name", model_files.DAMAGED_PARTS)
def test_damaged_weights_are_told_with_their_file(part_name: str, value: float, tmp_path: Path) -> None:
    path = model_files.write_damaged(tmp_path / "damaged.gguf", part_name, value)
    with open_model(path, **DISCRETE) as damaged, pytest.raises(LogitsNotFinite) as refusal:
        list(damaged.generate([1, 2], 4))
    assert "damaged.gguf" in refusal.value.__notes__[0]


LEFT_BEHIND_BYTES = 1500 * 4 * 4096
"""What 1,500 tokens would leave if each kept one row of logits, the smallest thing of theirs that is worth a look."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_does_not_grow_over_many_tokens(backend: str) -> None:
    """From 500 tokens to 2,000: not the model's own count, nor the driver's free memory, nor the process's.

    The last two may move by less than a row of logits a token: others use the device too, the driver gives memory in
    pieces of 2 MiB, and the interpreter's heap breathes.
    """
    from cupy.cuda import runtime

    with open_model(BUNDLED_MODEL, expert_memory="25%", **BACKENDS[backend]) as model:
        model.wait_for_host_tier()
        held, taken_bytes, in_use_bytes = [], [], []
        for _ in range(4):
            generation = model.generate([1], 500, ignore_eos=True)
            for _ in generation:
                pass
            held.append((generation.report.device_bytes, generation.report.pinned_bytes))
            free_bytes, total_bytes = runtime.memGetInfo()
            taken_bytes.append(total_bytes - free_bytes)
            in_use_bytes.append(rss_bytes())
    assert held[1:] == held[:1] * 3
    assert held[0][1] > 0
    assert taken_bytes[-1] - taken_bytes[0] < LEFT_BEHIND_BYTES, taken_bytes
    assert in_use_bytes[-1] - in_use_bytes[0] < LEFT_BEHIND_BYTES, in_use_bytes


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_compiles_nothing_that_was_not_compiled_while_it_loaded(backend: str) -> None:
    with open_model(BUNDLED_MODEL, expert_memory="25%", **BACKENDS[backend]) as model:
        kernels: dict[str, object] = model._ops._kernels._kernels  # type: ignore[attr-defined]  # of CupyOps
        loaded = set(kernels)
        for prompt in PROMPTS:
            for _ in model.generate(prompt, 8, ignore_eos=True):
                pass
        assert set(kernels) == loaded


def ran(*arguments: str, program: str = COMMAND, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that has ended, in a process of its own; one that hangs fails here."""
    command = [sys.executable, "-c", program, *arguments]
    environ = os.environ | environment
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_command_gives_the_cpus_tokens_and_the_devices_figures(
    exact_model: Path, cpu_texts: list[CpuText], backend: str
) -> None:
    text = cpu_texts[1]
    prompt = ",".join(map(str, text.tokens[: text.prompt_length]))
    run = ["run", str(exact_model), "--token-ids", prompt, "-n", "64", "--ignore-eos", "--json"]
    done = ran(*run, "--expert-memory", "25%", *OPTIONS[backend])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert text.agrees(told["tokens"])
    assert told["backend"] == BACKENDS[backend]["backend"]
    assert told["device_hits"] == told["hits"] > 0
    if backend == "discrete":
        assert told["h2d_bytes"] > told["expert_memory_bytes"]
        assert told["device_bytes"] > told["expert_memory_bytes"] + told["resident_bytes"]
        assert told["pinned_bytes"] > 0
        assert {"host_hits", "d2h_bytes"} <= set(told)
    else:
        assert (told["h2d_bytes"], told["device_bytes"], told["host_hits"]) == (0, 0, 0)
        assert told["pinned_bytes"] >= told["expert_memory_bytes"]


FULL_DEVICE = """
from cupy.cuda import runtime
from expertstream_cuda import Device
from expertstream_engine.cli import main

def all_of_it(device):
    return (memory(device)[1],) * 2

memory, Device.memory = Device.memory, all_of_it  # or the plan would refuse it
runtime.setDevice(0)
while (left_over := runtime.memGetInfo()[0] - (256 << 20)) > 16 << 20:
    runtime.malloc(left_over // 2)
main()
"""


def test_a_device_that_is_full_when_slots_are_allocated_ends_the_command_with_the_reason(tmp_path: Path) -> None:
    path = model_files.write_sparse(tmp_path / "large.gguf", blocks=2)
    arguments = ["run", str(path), "--token-ids", "1,2", "-n", "2", "--expert-memory", "all", *OPTIONS["discrete"]]
    done = ran(*arguments, program=FULL_DEVICE)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "error: 128 slots of " in done.stderr
    assert "cudaErrorMemoryAllocation" in done.stderr
    assert "Traceback" not in done.stderr


FAILING_DEVICE = """
import cupy
from expertstream_engine.cli import main
from expertstream_engine.session import Model

def failing_from_the_third_on(model, *arguments, **options):
    passes.append(1)
    if len(passes) == 3:
        with cupy.cuda.ExternalStream(model._ops.stream):
            cupy.RawKernel('extern "C" __global__ void fail() { asm("trap;"); }', "fail")((1,), (1,), ())
    return forward(model, *arguments, **options)

passes = []
forward, Model._forward = Model._forward, failing_from_the_third_on
main()
"""


@pytest.mark.parametrize(
    ("backend", "tier"),
    [("discrete", ["--host-memory", "all"]), ("discrete", ["--host-memory", "0"]), ("mapped", [])],
)
def test_a_device_that_fails_on_the_way_ends_the_command_with_what_was_done(backend: str, tier: list[str]) -> None:
    """By a kernel that stops, after which no call of this process on that device succeeds any more."""
    arguments = ["run", "--token-ids", "1,2,3", "-n", "8", "--ignore-eos", "--expert-memory", "25%", *OPTIONS[backend]]
    done = ran(*arguments, *tier, program=FAILING_DEVICE)
    assert done.returncode == 2, done.stderr
    assert "2 tokens generated, ended by failure" in done.stderr
    assert "error: the CUDA device failed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_devices_end_the_command_with_the_reason_and_give_the_cpu_its_turn(backend: str) -> None:
    run = ["run", "--token-ids", "1,2,3", "-n", "2", "--ignore-eos", "--json"]
    refused = ran(*run, *OPTIONS[backend], CUDA_VISIBLE_DEVICES="")
    why = "the CUDA driver finds no device; CUDA_VISIBLE_DEVICES is ''"
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"error: {why}" in refused.stderr
    _, name, *options = OPTIONS[backend]
    done = ran(*run, "--backend", f"{name},cpu", *options, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backend"] == "cpu"
    assert why in done.stderr
