"""Which kernels read a backend's slots: decided by where the memory is, as DLPack numbers it, and by nothing else.

The backend describes it before there are slots, and its views must agree.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

import expertstream_cpu
import expertstream_engine.session as session
from expertstream import BackendContractError, BackendUnavailable, DeviceDescription, hookimpl, usable_cores
from expertstream_engine import BUNDLED_MODEL, open_model
from expertstream_engine.demand import plan_run
from expertstream_engine.ops import address_of, ops_for
from expertstream_engine.ops.numba_ops import NumbaOps
from expertstream_engine.settings import RunSettings

HOST, CUDA, CUDA_HOST, METAL, CUDA_MANAGED = 1, 2, 3, 8, 13  # DLDeviceType: dlpack.h


class View:
    """All that the contract asks of a view, DLPack, and nothing that numpy's arrays have besides."""

    def __init__(self, memory: NDArray[np.uint8], device_type: int = HOST) -> None:
        self._memory, self._device_type = memory, device_type

    def __dlpack__(self, **options: Any) -> object:
        return self._memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device_type, 0


def describe_as(device_type: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU backend say that its slots are memory of that device type, and CuPy find a compiler."""

    def describe_device() -> DeviceDescription:
        return DeviceDescription("described by a test", dlpack_type=device_type)

    monkeypatch.setattr(expertstream_cpu, "describe_device", hookimpl(describe_device))
    cupy = MagicMock()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)


def show_as(device_type: int, monkeypatch: pytest.MonkeyPatch, from_slot: int = 0) -> None:
    """Let the CPU backend's views have DLPack alone, from a slot on of that device type."""
    real = expertstream_cpu.HostStore.device_view
    monkeypatch.setattr(
        expertstream_cpu.HostStore,
        "device_view",
        lambda store, slot: View(real(store, slot), device_type if slot >= from_slot else HOST),
    )


def never_called(what: str) -> Callable[..., Any]:
    """In the place of what must not happen."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError(what)

    return fail


def test_a_view_with_dlpack_alone_is_enough_to_run_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens() -> list[int]:
        with open_model(BUNDLED_MODEL, expert_memory="50%") as model:
            generation = model.generate([1, 5, 9], 12, ignore_eos=True)
            for _ in generation:
                pass
            return generation.tokens

    expected = tokens()
    show_as(HOST, monkeypatch)
    assert tokens() == expected


def test_a_host_view_is_found_where_its_bytes_are() -> None:
    memory = np.arange(64, dtype=np.uint8)
    for view in (memory[16:], View(memory[16:])):
        assert address_of(view) == memory.ctypes.data + 16
        assert isinstance(ops_for(view, None), NumbaOps)


@pytest.mark.parametrize("device_type", [CUDA_HOST, METAL])
def test_memory_that_no_kernels_read_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, device_type: int
) -> None:
    describe_as(device_type, monkeypatch)
    monkeypatch.setattr(expertstream_cpu, "HostStore", never_called("slots were allocated"))
    with pytest.raises(
        BackendUnavailable, match=rf"'cpu' are memory of DLPack device type {device_type}, .* 1 \(host\)"
    ):
        plan_run(BUNDLED_MODEL, RunSettings())


def test_memory_of_a_device_is_refused_where_nothing_compiles_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    describe_as(CUDA, monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setattr(expertstream_cpu, "HostStore", never_called("slots were allocated"))
    with pytest.raises(BackendUnavailable, match=r"'cpu' has its slots on a CUDA device, .*NVRTC.*Error: .*\[ctk\]"):
        plan_run(BUNDLED_MODEL, RunSettings())


@pytest.mark.parametrize(
    ("described", "shown", "from_slot"), [(HOST, CUDA, 0), (HOST, METAL, 3), (CUDA, HOST, 0), (CUDA, CUDA_MANAGED, 0)]
)
def test_views_that_are_not_as_described_are_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, described: int, shown: int, from_slot: int
) -> None:
    describe_as(described, monkeypatch)
    show_as(shown, monkeypatch, from_slot)
    monkeypatch.setattr(session, "load_resident", never_called("weights were loaded"))
    monkeypatch.setattr(session, "ops_for", never_called("an array library was chosen"))
    refusal = rf"backend 'cpu' .* slot {from_slot}, a View, .* device type {shown}; .* planned for {described}, "
    with pytest.raises(BackendContractError, match=refusal):
        open_model(BUNDLED_MODEL, expert_memory="50%")


def test_a_view_without_dlpack_is_the_backends_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expertstream_cpu.HostStore, "device_view", lambda store, slot: b"no memory of anyone's")
    with pytest.raises(BackendContractError, match=r"'cpu' .* __dlpack_device__ of a view raised AttributeError"):
        open_model(BUNDLED_MODEL)


@pytest.mark.parametrize("device_type", [CUDA, CUDA_MANAGED])
def test_threads_that_were_set_are_said_to_be_unused_where_a_device_computes(
    monkeypatch: pytest.MonkeyPatch, device_type: int
) -> None:
    array = types.SimpleNamespace(device=types.SimpleNamespace(id=3), data=types.SimpleNamespace(ptr=4096))
    stand_in = types.ModuleType("expertstream_engine.ops.cupy_ops")
    vars(stand_in).update(CupyOps=lambda device, reserved: (device, reserved), array_of=lambda view: array)
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    view = View(np.zeros(1, np.uint8), device_type)
    assert ops_for(view, None, 4096) == (3, 4096)
    assert address_of(view) == 4096
    describe_as(device_type, monkeypatch)
    with capture_logs() as events:
        assert plan_run(BUNDLED_MODEL, RunSettings()).plan.demand.on_device
    assert unused_threads(events) == []
    with capture_logs() as events:
        plan_run(BUNDLED_MODEL, RunSettings(threads=6))
    assert unused_threads(events) == [("warning", 6)]


def unused_threads(events: list[Any]) -> list[tuple[str, int]]:
    return [(event["log_level"], event["threads"]) for event in events if event["event"] == "threads_not_used"]


def test_the_cpu_computes_with_the_threads_that_were_set_else_with_one_a_core() -> None:
    view = np.zeros(1, np.uint8)
    with capture_logs() as events:
        threads = [ops_for(view, wanted)._pool.threads for wanted in (3, None)]  # type: ignore[attr-defined]  # NumbaOps
    assert threads == [3, usable_cores()]
    assert events == []
