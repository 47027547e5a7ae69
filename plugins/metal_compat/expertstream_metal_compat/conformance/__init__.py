"""What the conformance suite is told of this backend, and the promise that only it makes."""

from __future__ import annotations

import pytest


@pytest.fixture
def streams() -> tuple[int, int]:
    """Any two numbers are streams, each with a thread of its own."""
    return 1, 2
