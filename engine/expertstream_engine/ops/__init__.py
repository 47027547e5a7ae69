"""The arithmetic that models are written over: one protocol, and one module for each array library.

Which one computes follows from where a backend's slots are, as their views say by DLPack.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np

from expertstream import IO_ALIGNMENT_BYTES, Backend, BackendUnavailable, SlotLayout, SlotPart, usable_cores
from expertstream_engine.ops.protocol import Ops

_HOST, _CUDA, _CUDA_MANAGED = 1, 2, 13  # DLDeviceType: dlpack.h


def ops_for(view: Any, threads: int | None) -> Ops:
    """The Ops whose kernels read memory like `view`, a backend's view of a slot.

    `threads` are for those that compute on the CPU, None for one a core that this process may use. Raises
    BackendUnavailable where no kernels read such memory.
    """
    # An array library is imported when it is needed, and not where a run does without it.
    if _is_on_cuda(view):
        from expertstream_engine.ops.cupy_ops import CupyOps, array_of

        return CupyOps(int(array_of(view).device.id))
    from expertstream_engine.ops.numba_ops import NumbaOps

    return NumbaOps(threads or usable_cores())


def computes_on_device(backend: Backend) -> bool:
    """Whether the backend's slots are memory of a device's own array library, which then computes: asked of a page.

    Raises BackendUnavailable as `ops_for` does, and what allocating a page raises.
    """
    page = SlotLayout((SlotPart("page", 0, IO_ALIGNMENT_BYTES),))
    with closing(backend.alloc_slot_store(page, 1)) as store:
        return _is_on_cuda(store.device_view(0))


def address_of(view: Any) -> int:
    """Where a backend's view of a slot begins, for kernels. Raises BackendUnavailable as `ops_for` does."""
    if _is_on_cuda(view):
        from expertstream_engine.ops.cupy_ops import array_of

        return int(array_of(view).data.ptr)
    return int(np.from_dlpack(view).ctypes.data)


def _is_on_cuda(view: Any) -> bool:
    """Whether CUDA kernels read it; False where the host does. Raises BackendUnavailable for all else."""
    device_type = int(view.__dlpack_device__()[0])
    if device_type not in (_HOST, _CUDA, _CUDA_MANAGED):
        raise BackendUnavailable(
            f"the backend's slots are memory of DLPack device type {device_type}, as a {type(view).__name__}, and the"
            f" engine has kernels for {_HOST} (host), {_CUDA} and {_CUDA_MANAGED} (CUDA) only: select another backend,"
            f" or views of host memory where this one has such an option"
        )
    return device_type != _HOST
