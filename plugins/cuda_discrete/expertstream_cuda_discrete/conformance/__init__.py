"""What the conformance suite needs to know of this backend: streams, a commit that fails, and scarce pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from expertstream import Backend, SlotLayout

_MEMORY_ALLOCATION, _UNKNOWN = 2, 999  # cudaErrorMemoryAllocation, cudaErrorUnknown: driver_types.h


@pytest.fixture
def streams(backend: Backend) -> Iterator[Sequence[int]]:
    """Two streams that wait neither for each other nor for the default one, and that one."""
    import cupy  # when it is needed, see expertstream_cuda

    both = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    yield (*(stream.ptr for stream in both), 0)
    for stream in both:
        stream.synchronize()


@pytest.fixture
def break_next_commit() -> Callable[[Any], None]:
    """The driver refuses the next copy, as it does when the device has fallen off the bus."""

    def break_next(store: Any) -> None:
        runtime = store.device.runtime

        class Refusing:
            """The runtime, whose next copy fails."""

            def __getattr__(self, name: str) -> Any:
                return getattr(runtime, name)

            def memcpyAsync(self, *arguments: int) -> None:
                store._runtime = runtime
                raise runtime.CUDARuntimeError(_UNKNOWN)

        store._runtime = Refusing()

    return break_next


@pytest.fixture
def starve_staging(monkeypatch: pytest.MonkeyPatch) -> Callable[[SlotLayout, int], None]:
    """The driver refuses pinned memory for more buffers than that, as it does when too much is pinned already."""
    import cupy

    runtime = cupy.cuda.runtime
    pin = runtime.hostAlloc

    def starve(layout: SlotLayout, buffer_count: int) -> None:
        def pin_no_more(size_bytes: int, flags: int) -> int:
            if size_bytes >= (buffer_count + 1) * layout.slot_bytes:
                raise runtime.CUDARuntimeError(_MEMORY_ALLOCATION)
            return int(pin(size_bytes, flags))

        monkeypatch.setattr(runtime, "hostAlloc", pin_no_more)

    return starve
