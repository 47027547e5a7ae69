"""What the conformance suite needs to know of this backend: streams of the device, and a commit that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from expertstream import Backend

_UNKNOWN = 999  # cudaErrorUnknown: driver_types.h


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
