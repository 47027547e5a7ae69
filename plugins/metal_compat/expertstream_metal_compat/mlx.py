"""The device as MLX tells it, its arrays of memory that is not its own, and when its work is over.

Written for a Mac with MLX; not run here: no machine of the project has one. Tests put a stand-in in its place.
Source: MLX 0.32.1, python/src (ops.cpp, convert.cpp, device.cpp, transforms.cpp) and mlx/stream.cpp.
"""

from __future__ import annotations

import importlib
import mmap
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from expertstream import BackendUnavailable, DeviceOutOfMemory

DLPACK_TYPE = 8
"""What every MLX array says of its memory by DLPack on a machine with Metal: kDLMetal."""


@frozen
class Mlx:
    """MLX on a machine with Metal."""

    core: Any  # the module mlx.core, which is untyped

    @property
    def device_name(self) -> str:
        """The device as its driver names it."""
        return str(self._info().get("device_name", "a Metal device"))

    @property
    def memory_bytes(self) -> int:
        """The machine's memory, which the device shares."""
        return int(self._info()["memory_size"])

    @property
    def recommended_working_set_bytes(self) -> int:
        """What the device can use without losing speed: Metal's recommendedMaxWorkingSetSize."""
        return int(self._info()["max_recommended_working_set_size"])

    def check_adoption(self) -> None:
        """Raise BackendUnavailable where this MLX can only copy memory that is not its own."""
        page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        try:
            self._adopt(page)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise BackendUnavailable(
                f"this MLX cannot use memory without a copy, which 0.32.1 is the first to do; update it: {error}"
            ) from error

    def adopt(self, slots: NDArray[np.uint8], size_bytes: int) -> list[Any]:
        """For each row of (slot_count, whole pages), an MLX array of its first `size_bytes`; not a copy.

        Any thread may use them. Whoever has asked keeps them: MLX may write results into an array that nobody holds.
        Raises DeviceOutOfMemory where MLX refuses one.
        """
        try:
            views = [self._adopt(pages)[:size_bytes] for pages in slots]  # the slice shares the buffer of its pages
            self.core.eval(views)  # it is lazy, and other threads could not make up for that
        except (ValueError, RuntimeError) as error:
            raise DeviceOutOfMemory(
                f"MLX does not take {len(slots)} slots of {size_bytes} bytes, {slots.nbytes} bytes in all, without a"
                f" copy: {error}"
            ) from error
        return views

    def mark(self) -> Any:
        """What `wait` waits for: all that the calling thread has launched on the device so far. Does not block.

        Launched is what was given to MLX's `eval` or `async_eval`, on the device's default stream. Each thread has its
        own of these, so it is the launching thread that marks.
        """
        mark = self.core.add(0, 0, stream=self.core.gpu)  # work of no account: a stream does it after what it has
        self.core.async_eval(mark)
        return mark

    def wait(self, mark: Any) -> None:
        """Block until what was marked is over. Any thread may wait, one for each mark."""
        self.core.eval(mark)

    def _adopt(self, pages: NDArray[np.uint8]) -> Any:
        """An MLX array of the same bytes. Metal takes whole pages without a copy, nothing else."""
        return self.core.asarray(pages, copy=False)

    def _info(self) -> dict[str, Any]:
        of_any_device = getattr(self.core, "device_info", None)  # the older name is deprecated where this one is
        # Without an argument it tells of the default device, which the user may have set to the CPU.
        return dict(of_any_device(self.core.gpu) if of_any_device else self.core.metal.device_info())


def find_mlx() -> Mlx | None:
    """MLX, None where it is not installed or has no Metal, as on Linux."""
    try:
        core = importlib.import_module("mlx.core")
    except ImportError:
        return None
    return Mlx(core) if core.metal.is_available() else None
