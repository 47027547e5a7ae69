"""The public API as its users type it: checked by mypy, never run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

from expertstream import (
    Backend,
    Checkpoint,
    Commit,
    Counters,
    Demand,
    ExpertKey,
    ExpertStreamer,
    Lease,
    MemoryRequest,
    Plan,
    SlotBudget,
    SlotLayout,
    SlotStore,
    Staging,
    available_memory,
    hookimpl,
    make_plan,
    open_backend,
    open_checkpoint,
)
from expertstream_engine import DeviceMemory, Generation, GenerationReport, Model, SamplingSettings, open_model


def an_engine_leases_experts(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    assert_type(checkpoint, Checkpoint)
    backend = open_backend("cpu")
    assert_type(backend, Backend)
    demand = Demand(resident_bytes=checkpoint.resident_bytes, kv_cache_bytes=0, workspace_bytes=0, context_tokens=0)
    plan = make_plan(checkpoint, demand, MemoryRequest.parse("25%"), backend, available_memory())
    assert_type(plan, Plan)
    with ExpertStreamer(checkpoint, plan, backend, policy="lru") as streamer:
        with streamer.acquire(0, [1, 2], wait=False) as lease:
            assert_type(lease, Lease)
            assert_type(lease.view(0), Mapping[str, Any])
        assert_type(streamer.counters - Counters(), Counters)
        assert_type(streamer.seed({ExpertKey(0, 1): 1.0}), int)
        assert_type(streamer.hottest(), dict[ExpertKey, float])


def a_user_generates(path: Path) -> None:
    with open_model(path, expert_memory="8GiB", threads=4) as model:
        assert_type(model, Model)
        assert_type(model.device_memory, DeviceMemory)
        generation = model.generate("text", 16, SamplingSettings(temperature=0.7, seed=1))
        assert_type(generation, Generation)
        for piece in generation:
            assert_type(piece, str)
        assert_type(generation.report, GenerationReport)
        assert_type(generation.report.decode.hit_rate, float | None)


@hookimpl
def budget_for_expert_size(expert_bytes: int, asked: int | None) -> SlotBudget:
    return SlotBudget(asked or 1, f"as asked, {expert_bytes} bytes each")


@hookimpl
def commit_slot(store: SlotStore, staging: Staging) -> Commit:
    store.stage(staging.slot).view[0] = 0
    assert_type(store.layout, SlotLayout)
    raise NotImplementedError
