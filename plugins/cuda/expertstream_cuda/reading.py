"""Slots read by kernels at chosen moments, for checks: none of this runs while a model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from expertstream import DeviceOutOfMemory, MachineError
from expertstream_cuda.device import Device

_SOURCE = r"""
extern "C" __global__ void hold(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < nanoseconds);
}

extern "C" __global__ void read(const uint4 *slot, uint4 *seen, long long count) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) seen[i] = slot[i];
}
"""


def launch_read(device: Device, address: int, size_bytes: int, stream: int, after_ms: int) -> Callable[[], bytes]:
    """As the hook of this name; `address` is where kernels find the slot, a multiple of 16 as is `size_bytes`."""
    import cupy  # as everywhere here: when it is needed, see this package's opening lines

    with _failing(device):
        device.use()
        hold, read = _kernels(device.number)
        # All that a launch looks at; CuPy's classes for foreign streams differ by version.
        on = SimpleNamespace(ptr=stream)
        seen = cupy.empty(size_bytes, cupy.uint8)
        hold((1,), (1,), (after_ms * 1_000_000,), 0, on)
        read((64,), (256,), (address, seen, size_bytes // 16), 0, on)
        read_event = cupy.cuda.Event(disable_timing=True)
        device.runtime.eventRecord(read_event.ptr, stream)

    def result() -> bytes:
        with _failing(device):
            device.use()
            read_event.synchronize()
            return _copied(seen.data.ptr, size_bytes)

    return result


def read_back(device: Device, address: int, size_bytes: int) -> bytes:
    """The bytes that a kernel finds at `address` now, on a stream of its own so that it waits for nothing."""
    import cupy

    with _failing(device):
        device.use()
        stream = cupy.cuda.Stream(non_blocking=True)
    return launch_read(device, address, size_bytes, stream.ptr, 0)()


@contextmanager
def _failing(device: Device) -> Iterator[None]:
    """As `Device.failing`, also of what kernels raise: CuPy loads and launches them by the driver's own interface."""
    import cupy

    with device.failing():
        try:
            yield
        except cupy.cuda.driver.CUDADriverError as error:
            raise MachineError(f"CUDA device {device.number} ({device.name}): {error}") from error
        except cupy.cuda.memory.OutOfMemoryError as error:
            free_bytes, _ = device.memory()
            raise DeviceOutOfMemory(f"no room on {device.name} to copy a slot; {free_bytes} are free") from error


def _copied(address: int, size_bytes: int) -> bytes:
    import cupy

    runtime = cupy.cuda.runtime
    stream = cupy.cuda.Stream(non_blocking=True)  # the default stream would wait for every blocking one
    copy = np.empty(size_bytes, np.uint8)
    runtime.memcpyAsync(copy.ctypes.data, address, size_bytes, runtime.memcpyDeviceToHost, stream.ptr)
    stream.synchronize()
    return copy.tobytes()


@cache
def _kernels(device_number: int) -> tuple[Any, Any]:
    """Compiled for the current device, which is number `device_number`."""
    import cupy

    module = cupy.RawModule(code=_SOURCE, backend="nvrtc")
    return module.get_function("hold").kernel, module.get_function("read").kernel
