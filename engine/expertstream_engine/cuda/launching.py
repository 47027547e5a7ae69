"""Launches a compiled kernel so that it may begin before the one ahead of it in the stream has ended.

launches.cuh says what a kernel may do until then. CuPy's own launches cannot ask for it, so this is the driver's call.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any

import numpy as np
from attrs import frozen
from cupy.cuda import driver


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID in cuda.h
_EARLY = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))


@frozen(eq=False)
class Kernel:
    """A kernel of 64-bit arguments: integers, floats, arrays on the device, or None for no address."""

    function: Any  # CuPy's; it keeps the module loaded
    is_early: bool  # whether the device can begin it before the one ahead has ended

    def __call__(self, grid: tuple[int, ...], threads: int, arguments: tuple[Any, ...], stream: Any) -> None:
        """Launches it on a stream of CuPy's, in its order. Raises CUDADriverError."""
        values = (ctypes.c_int64 * len(arguments))(*map(_bits, arguments))
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(arguments))(*range(first, first + 8 * len(arguments), 8))
        shape = (*grid, 1, 1)[:3]
        config = _Config(shape, (threads, 1, 1), 0, stream.ptr, ctypes.pointer(_EARLY), self.is_early)
        driver.check_status(_launch()(ctypes.byref(config), self.function.ptr, places, None))


def _bits(argument: Any) -> int:
    if isinstance(argument, int | np.integer):
        return int(argument)
    if isinstance(argument, float):
        return int(struct.unpack("q", struct.pack("d", argument))[0])
    return 0 if argument is None else int(argument.data.ptr)


@cache
def _launch() -> Any:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = (ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return launch
