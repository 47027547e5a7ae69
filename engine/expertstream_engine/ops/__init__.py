"""The arithmetic that models are written over: one protocol, and one module for each array library."""

from __future__ import annotations

from typing import Any

from expertstream_engine.ops.protocol import Ops


def ops_for(view: Any, threads: int) -> Ops:
    """The Ops whose kernels read arrays like `view`, a backend's view of a slot; `threads` are for the CPU's."""
    # An array library is imported when it is needed, and not where a run does without it.
    if hasattr(view, "__cuda_array_interface__"):
        from expertstream_engine.ops.cupy_ops import CupyOps, device_of

        return CupyOps(device_of(view))
    from expertstream_engine.ops.numba_ops import NumbaOps

    return NumbaOps(threads)


def address_of(view: Any) -> int:
    """Where a backend's view of a slot begins, for kernels."""
    interface = getattr(view, "__cuda_array_interface__", None) or view.__array_interface__
    return int(interface["data"][0])
