"""What metal_compat uses of `mlx.core`, made of numpy, because no machine of the project has the real one.

Names, signatures, laziness and refusals are those of MLX 0.32.1 (python/src: array.cpp, convert.cpp, device.cpp,
ops.cpp, transforms.cpp; mlx/stream.cpp).
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

GIB = 1 << 30


class Array:
    """An MLX array. It is lazy until it is evaluated, which only the thread can do whose stream it was made on."""

    def __init__(self, data: NDArray[Any], made_in: int | None = None) -> None:
        self.data = data
        self.made_in = made_in
        """The thread whose stream is to make it; None once it is made, or launched."""
        self.after: Sequence[threading.Event] = ()
        """What it waits for that was launched before it."""

    def __getitem__(self, index: slice) -> Array:
        whole = self.data[index].shape == self.data.shape and self.made_in is None
        return self if whole else Array(self.data[index], threading.get_ident())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        assert self.made_in is None, "a test reads what was not evaluated"
        return self.data


class MlxStandIn:
    """Stands for the module. `largest_bytes` is the largest buffer that Metal takes."""

    gpu = "gpu"
    cpu = "cpu"

    class metal:
        @staticmethod
        def is_available() -> bool:
            return True

    def __init__(self, *, largest_bytes: int = 8 * GIB) -> None:
        self.largest_bytes = largest_bytes
        self.adopted: list[NDArray[Any]] = []
        self._launched: dict[int, list[threading.Event]] = {}

    def launch_kernel(self) -> Callable[[], None]:
        """For tests: launch work on the calling thread's stream, over when the answer is called."""
        over = threading.Event()
        self._launched.setdefault(threading.get_ident(), []).append(over)
        return over.set

    def device_info(self, d: str | None = None) -> dict[str, str | int]:
        """By default that of the default device, which here is the CPU: it has other keys than a GPU."""
        if (d or self.cpu) == self.cpu:
            return {"device_name": "a CPU", "architecture": "arm64"}
        return {"device_name": "M0", "memory_size": 8 * GIB, "max_recommended_working_set_size": 4 * GIB}

    def array(self, val: Any, dtype: Any = None) -> Array:
        """Always a copy."""
        return Array(np.array(val, dtype))

    def asarray(self, a: Any, dtype: Any = None, *, copy: bool | None = None) -> Array:
        refused = a.ctypes.data % mmap.PAGESIZE or a.nbytes % mmap.PAGESIZE or a.nbytes > self.largest_bytes
        if copy is False and (refused or dtype is not None):
            raise ValueError("[convert] Cannot import a CPU array without a copy.")
        if copy or refused:
            return self.array(a, dtype)
        self.adopted.append(a)
        return Array(a.view())

    def add(self, a: int, b: int, *, stream: str | None = None) -> Array:
        assert stream == self.gpu, "on another stream it would not come after what the device has to do"
        return Array(np.array(a + b), threading.get_ident())

    def async_eval(self, *args: Any) -> None:
        for array in _leaves(args):
            self._launch(array)
            array.after = tuple(self._launched.get(threading.get_ident(), ()))

    def eval(self, *args: Any) -> None:
        for array in _leaves(args):
            self._launch(array)
            for launched in array.after:
                launched.wait()

    def _launch(self, array: Array) -> None:
        if array.made_in not in (None, threading.get_ident()):
            raise RuntimeError("There is no Stream(gpu, 1) in current thread.")
        array.made_in = None


def _leaves(tree: Any) -> list[Array]:
    return [tree] if isinstance(tree, Array) else [leaf for branch in tree for leaf in _leaves(branch)]
