"""Whole models on a CUDA device: the CPU's tokens, and the same bits whatever the slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

import model_files
from expertstream import BackendOption, BudgetTooSmall
from expertstream_cuda.device import _devices
from expertstream_engine import BUNDLED_MODEL, open_model
from expertstream_engine.architecture import FAMILIES
from gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

DISCRETE: dict[str, Any] = {"backend": "cuda_discrete"}
MAPPED: dict[str, Any] = {"backend": "cuda_unified", "backends": (BackendOption("cuda_unified", "mapped", True),)}
BACKENDS = {"discrete": DISCRETE, "mapped": MAPPED}
PROMPTS = [np.random.default_rng(length).integers(1, 4096, length).tolist() for length in (1, 24, 300)]
CLEAR = 1e-3  # between the two best logits

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


@pytest.fixture(scope="module")
def smallest_bytes() -> int:
    with pytest.raises(BudgetTooSmall) as refusal:
        open_model(BUNDLED_MODEL, expert_memory="1", **DISCRETE)
    return refusal.value.smallest_bytes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget", ["all", "50%", "25%", "smallest"])
def test_budget_and_backend_change_no_bit(resident: Answer, smallest_bytes: int, budget: str, backend: str) -> None:
    memory = str(smallest_bytes) if budget == "smallest" else budget
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


@pytest.mark.parametrize("host_memory", ["all", "40%", "0"])
@pytest.mark.parametrize("host_tier", ["inclusive", "exclusive"])
@pytest.mark.parametrize("budget", ["25%", "smallest"])
def test_a_host_tier_changes_no_bit(
    resident: Answer, smallest_bytes: int, budget: str, host_tier: str, host_memory: str
) -> None:
    """Also while it grows: nothing waits for it."""
    memory = str(smallest_bytes) if budget == "smallest" else budget
    kind = {} if host_memory == "0" else {"host_tier": host_tier}
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
        assert least < report.device_bytes <= report.planned_device_bytes + (8 << 20)
        assert 0 < report.pinned_bytes <= plan.staging_bytes


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_files.write_dequantized(model_files.TINY_Q8_0, tmp_path_factory.mktemp("f32") / "tiny15m-f32.gguf")


@pytest.fixture(scope="module")
def cpu_texts(exact_model: Path) -> list[tuple[list[int], int, np.ndarray]]:
    """For each prompt the CPU's greedy text with it, the prompt's length, and the logits at every position."""
    texts = []
    with open_model(exact_model, expert_memory="all", backend="cpu") as model:
        for prompt in PROMPTS:
            generation = model.generate(prompt, 64, ignore_eos=True)
            for _ in generation:
                pass
            text = [*prompt, *generation.tokens]
            texts.append((text, len(prompt), model.logits(text[:-1], all_positions=True)))
    return texts


@pytest.mark.parametrize("budget", ["all", "25%"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exact_file_gives_the_cpus_tokens(
    exact_model: Path, cpu_texts: list[tuple[list[int], int, np.ndarray]], budget: str, backend: str
) -> None:
    with open_model(exact_model, expert_memory=budget, **BACKENDS[backend]) as model:
        for text, prompt_length, expected in cpu_texts:
            logits = model.logits(text[:-1], all_positions=True)
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
            best_two = np.sort(expected, axis=1)[:, -2:]
            clear = best_two[:, 1] - best_two[:, 0] >= CLEAR
            np.testing.assert_array_equal(logits.argmax(1)[clear], expected.argmax(1)[clear])
            generation = model.generate(text[:prompt_length], 64, ignore_eos=True)
            for _ in generation:
                pass
            until = prompt_length - 1 + next(iter(np.flatnonzero(~clear[prompt_length - 1 :]).tolist()), 64)
            assert generation.tokens[: until + 1 - prompt_length] == text[prompt_length : until + 1]


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_each_architecture_gives_the_cpus_logits(architecture: str, tmp_path: Path) -> None:
    path = model_files.write_random(architecture, tmp_path / "random.gguf")
    tokens = np.random.default_rng(5).integers(1, 300, 40).tolist()
    with open_model(path, expert_memory="50%", backend="cpu") as model:
        expected = model.logits(tokens, all_positions=True)
    with open_model(path, expert_memory="50%", **DISCRETE) as model:
        np.testing.assert_allclose(model.logits(tokens, all_positions=True), expected, rtol=0, atol=1e-3)


def test_memory_does_not_grow_over_many_tokens() -> None:
    with open_model(BUNDLED_MODEL, expert_memory="25%", **DISCRETE) as model:
        held = []
        for _ in range(4):
            generation = model.generate([1], 500, ignore_eos=True)
            for _ in generation:
                pass
            held.append(generation.report.device_bytes)
    assert held[1:] == held[:1] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_compiles_nothing_that_was_not_compiled_while_it_loaded(backend: str) -> None:
    with open_model(BUNDLED_MODEL, expert_memory="25%", **BACKENDS[backend]) as model:
        kernels: dict[str, object] = model._ops._kernels._kernels  # type: ignore[attr-defined]  # of CupyOps
        loaded = set(kernels)
        for prompt in PROMPTS:
            for _ in model.generate(prompt, 8, ignore_eos=True):
                pass
        assert set(kernels) == loaded
