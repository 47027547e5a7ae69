"""Whether this machine has a CUDA device, for tests that need one; run as a program, it fails where it has none."""

from __future__ import annotations

import sys

import pytest

from expertstream import probe_backends

_problem = next(status.problem for status in probe_backends() if status.offer.name == "cuda_discrete")

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(_problem is not None, reason=_problem or "")]
"""The marks of a test module that runs on a CUDA device alone."""

if __name__ == "__main__":
    sys.exit(_problem and f"no GPU test can run here: {_problem}")
