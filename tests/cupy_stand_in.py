"""A stand-in for CuPy, for what can be tested of the engine's CUDA modules without a device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import MagicMock

import pytest

OF_CUPY = (
    "expertstream_engine.cuda.launching",
    "expertstream_engine.cuda.kernels",
    "expertstream_engine.ops.cupy_ops",
)
"""The modules that import CuPy, each after those that it imports."""


class FakeError(RuntimeError):
    """What CuPy's two bindings raise; 2 is out of memory in both."""

    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


class RuntimeFailed(FakeError):
    """Of the runtime."""


class DriverFailed(FakeError):
    """Of the driver, which loads and launches kernels."""


class PoolIsFull(MemoryError):
    """Of CuPy's own pool."""


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """A CuPy that does nothing, and none of the modules that import it, which are to be imported anew inside."""
    fake = MagicMock()
    fake.cuda.runtime.CUDARuntimeError, fake.cuda.driver.CUDADriverError = RuntimeFailed, DriverFailed
    fake.cuda.memory.OutOfMemoryError = PoolIsFull
    fake.cuda.runtime.memGetInfo.return_value = 4096, 8192
    fake.cuda.nvrtc.getVersion.return_value = 13, 0
    for name, module in {"cupy": fake, "cupy.cuda": fake.cuda, "cupy.cuda.runtime": fake.cuda.runtime}.items():
        monkeypatch.setitem(sys.modules, name, module)
    real = {name: sys.modules.pop(name, None) for name in OF_CUPY}
    try:
        yield fake
    finally:
        for name, module in real.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
