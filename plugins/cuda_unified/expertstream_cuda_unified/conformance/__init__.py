"""What the conformance suite needs to know of this backend: streams of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from expertstream import Backend


@pytest.fixture
def streams(backend: Backend) -> Iterator[Sequence[int]]:
    """Two streams that wait neither for each other nor for the default one, and that one."""
    import cupy  # when it is needed, see expertstream_cuda

    both = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    yield (*(stream.ptr for stream in both), 0)
    for stream in both:
        stream.synchronize()
