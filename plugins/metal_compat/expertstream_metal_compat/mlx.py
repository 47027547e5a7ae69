"""The device as MLX tells it, and its arrays of memory that is not its own.

Written for a Mac with MLX; not run here: no machine of the project has one. Tests put a stand-in in its place.
"""

from __future__ import annotations

import importlib
import mmap
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from expertstream import BackendUnavailable

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
            self.adopt(page, page.size)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BackendUnavailable(f"this MLX cannot use memory without a copy; update it: {error}") from error

    def adopt(self, pages: NDArray[np.uint8], size_bytes: int) -> Any:
        """An MLX array of the first `size_bytes` of whole, page-aligned pages; the same bytes, not a copy."""
        # Metal takes whole pages without a copy, nothing else; the slice afterwards shares its buffer.
        return self.core.array(pages, copy=False)[:size_bytes]

    def synchronize(self) -> None:
        """Block until all that was launched so far is over."""
        self.core.synchronize(self.core.default_stream(self.core.gpu))

    def _info(self) -> dict[str, Any]:
        of_any_device = getattr(self.core, "device_info", None)  # the older name is deprecated where this one is
        return dict(of_any_device() if of_any_device else self.core.metal.device_info())


def find_mlx() -> Mlx | None:
    """MLX, None where it is not installed or has no Metal, as on Linux."""
    try:
        core = importlib.import_module("mlx.core")
    except ImportError:
        return None
    return Mlx(core) if core.metal.is_available() else None
