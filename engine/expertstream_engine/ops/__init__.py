"""The arithmetic that models are written over: one protocol, and one module for each array library.

Which one computes follows from where a backend's slots are, as its description says and their views by DLPack.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from expertstream import Backend, BackendContractError, BackendUnavailable, usable_cores
from expertstream_engine.ops.protocol import Ops

_HOST, _CUDA, _CUDA_MANAGED = 1, 2, 13  # DLDeviceType: dlpack.h


def computes_on_device(backend: Backend, dlpack_type: int) -> bool:
    """Whether a device's kernels read the backend's slots, in memory of that type as it says; False where the CPU does.

    Raises BackendUnavailable where no kernels read such memory, or nothing is here to compile them.
    """
    if dlpack_type not in (_HOST, _CUDA, _CUDA_MANAGED):
        raise BackendUnavailable(
            f"the slots of backend {backend.name!r} are memory of DLPack device type {dlpack_type}, and the engine has"
            f" kernels for {_HOST} (host), {_CUDA} and {_CUDA_MANAGED} (CUDA) only: select another backend, or views of"
            f" host memory where this one has such an option"
        )
    if dlpack_type == _HOST:
        return False
    _check_compiler(backend)
    return True


def check_view(backend: Backend, dlpack_type: int, slot: int, view: Any) -> None:
    """Raise BackendContractError unless the backend's view of a slot is memory of the type that it was planned for."""
    found = backend.asked("__dlpack_device__ of a view", lambda: int(view.__dlpack_device__()[0]))
    if found != dlpack_type:
        raise BackendContractError(
            f"{backend.offer}: the view of slot {slot}, a {type(view).__name__}, is memory of DLPack device type"
            f" {found}; the run was planned for {dlpack_type}, the dlpack_type that describe_device answered: it must"
            f" answer what the views of every slot say"
        )


def ops_for(view: Any, threads: int | None, reserved_bytes: int = 0) -> Ops:
    """The Ops whose kernels read memory like `view`, a backend's view of a slot that `check_view` has passed.

    `threads` are for those that compute on the CPU, None for one a core that this process may use. `reserved_bytes` are
    for a device with memory of its own: what the arrays to come take of it, had at enter.
    """
    # An array library is imported when it is needed, and not where a run does without it.
    if _is_on_device(view):
        from expertstream_engine.ops.cupy_ops import CupyOps, array_of

        return CupyOps(int(array_of(view).device.id), reserved_bytes)
    from expertstream_engine.ops.numba_ops import NumbaOps

    return NumbaOps(threads or usable_cores())


def address_of(view: Any) -> int:
    """Where a backend's view of a slot, which `check_view` has passed, begins for kernels."""
    if _is_on_device(view):
        from expertstream_engine.ops.cupy_ops import array_of

        return int(array_of(view).data.ptr)
    return int(np.from_dlpack(view).ctypes.data)


def _check_compiler(backend: Backend) -> None:
    """CuPy comes without NVRTC unless its extra `ctk` is asked for, and looks for it at the first kernel alone."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # a broken installation may raise anything, as RuntimeError where NVRTC is not found
        raise BackendUnavailable(
            f"backend {backend.name!r} has its slots on a CUDA device, whose kernels the engine compiles with CuPy and"
            f" NVRTC, and these cannot be loaded ({type(error).__name__}: {str(error).strip()}): pip install"
            f" 'cupy-cuda13x[ctk]', or 'cupy-cuda12x[ctk]' for drivers older than 580; or, beside the CuPy that is"
            f" there, install a CUDA toolkit of its version"
        ) from error


def _is_on_device(view: Any) -> bool:
    return int(view.__dlpack_device__()[0]) != _HOST
