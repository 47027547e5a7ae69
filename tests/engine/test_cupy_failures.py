"""A CUDA driver that fails while a model computes: its errors come out as this library's. CuPy is a stand-in here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from cupy_stand_in import OF_CUPY, DriverFailed, PoolIsFull, RuntimeFailed, stand_in
from expertstream import DeviceOutOfMemory, MachineError


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    with stand_in(monkeypatch) as fake:
        yield fake


@pytest.fixture
def ops(cupy: MagicMock) -> Any:
    return importlib.import_module(OF_CUPY[-1]).CupyOps(0).__enter__()


HOST = np.zeros((1, 4), np.float32)


@pytest.mark.parametrize(("status", "kind"), [(2, DeviceOutOfMemory), (700, MachineError)])
@pytest.mark.parametrize(
    ("failing", "call"),
    [
        ("runtime.setDevice", lambda ops: ops.embed(MagicMock(), np.zeros(1, np.int64))),
        ("runtime.setDevice", lambda ops: ops.prepare((), lambda name: None)),
        ("runtime.memcpyAsync", lambda ops: ops.array(HOST)),
        ("runtime.memcpyAsync", lambda ops: ops.copy(MagicMock(shape=(1, 4)), MagicMock(shape=(1, 4)))),
        ("runtime.memcpyAsync", lambda ops: ops.to_host(MagicMock(shape=(1, 4)))),
        ("runtime.memsetAsync", lambda ops: ops.zeros(4)),
        ("Stream.return_value.synchronize", lambda ops: ops.place(HOST.view(np.uint8))),
        ("Stream.return_value.synchronize", lambda ops: ops.__exit__(None, None, None)),
        ("Stream.return_value.begin_capture", lambda ops: [ops.repeated("a", list) for _ in range(2)]),
        ("Stream.return_value.end_capture", lambda ops: [ops.repeated("a", list) for _ in range(2)]),
        (
            "Stream.return_value.end_capture.return_value.launch",
            lambda ops: [ops.repeated("a", list) for _ in range(2)],
        ),
        ("alloc_pinned_memory", lambda ops: ops.top_k(HOST, 2, False)),
        ("MemoryPool.return_value.malloc", lambda ops: ops.empty(4)),
    ],
)
def test_what_the_runtime_raises_is_a_machine_error(
    cupy: MagicMock, ops: Any, failing: str, call: Any, status: int, kind: type[Exception]
) -> None:
    cupy.cuda.configure_mock(**{f"{failing}.side_effect": RuntimeFailed(status)})
    with pytest.raises(MachineError, match=f"error {status}") as error:
        call(ops)
    assert type(error.value) is kind
    assert isinstance(error.value.__cause__, RuntimeFailed)


def test_a_kernel_that_cannot_be_launched_is_a_machine_error(
    cupy: MagicMock, ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[int] = []

    def check_status(status: int) -> None:
        statuses.append(status)
        raise DriverFailed(status)

    cupy.cuda.driver.check_status = check_status
    cupy.cuda.Stream.return_value.ptr = 16
    monkeypatch.setattr(sys.modules[OF_CUPY[0]], "_launch", lambda: lambda *arguments: 701)
    with pytest.raises(MachineError, match="error 701"):
        ops.add(MagicMock(size=4), MagicMock())
    assert statuses == [701]


def test_a_kernel_that_cannot_be_loaded_is_a_machine_error(cupy: MagicMock, ops: Any) -> None:
    cupy.RawModule.return_value.get_function.side_effect = DriverFailed(209)
    with pytest.raises(MachineError, match="error 209"):
        ops.add(MagicMock(size=4), MagicMock())


def test_a_full_pool_says_what_was_asked_and_what_is_free(cupy: MagicMock, ops: Any) -> None:
    cupy.cuda.MemoryPool.return_value.malloc.side_effect = PoolIsFull()
    with pytest.raises(DeviceOutOfMemory, match=r"32 bytes of device memory.*4096 are free"):
        ops.empty(2, 4)


def test_what_is_reserved_is_had_before_the_first_array_or_refused(cupy: MagicMock) -> None:
    pool = cupy.cuda.MemoryPool.return_value
    ops = importlib.import_module(OF_CUPY[-1]).CupyOps(0, 5 << 20)
    ops.__enter__()
    assert [call.args[0] for call in pool.malloc.call_args_list] == [5 << 20, 8]
    pool.malloc.side_effect = PoolIsFull()
    with pytest.raises(DeviceOutOfMemory, match=r"5242880 bytes of device memory.*4096 are free"):
        ops.__enter__()


def test_mistakes_in_the_program_are_not_taken_for_the_drivers(cupy: MagicMock, ops: Any) -> None:
    cupy.cuda.runtime.memsetAsync.side_effect = RuntimeError("a mistake")
    with pytest.raises(RuntimeError, match="a mistake"):
        ops.zeros(4)


def test_work_that_was_interrupted_is_not_recorded_before_it_has_run_once(cupy: MagicMock, ops: Any) -> None:
    stream = cupy.cuda.Stream.return_value
    seen: list[bool] = []

    def work() -> None:
        seen.append(stream.begin_capture.called)
        if len(seen) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ops.repeated("a", work)
    for _ in range(3):
        ops.repeated("a", work)
    assert seen == [False, False, True]
    assert stream.end_capture.return_value.launch.call_count == 2
