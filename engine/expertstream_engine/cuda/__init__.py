"""CUDA kernels by name, compiled by NVRTC for the device at hand when first asked for.

CuPy caches what is compiled on disk, by source and device. It owns no memory and launches nothing.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import cupy
from attrs import frozen

TOKENS_AT_ONCE = 8
"""Tokens for which a row of weights is unpacked once, where there are several; then it is one row at a time."""

_WARPS = 8  # of a block that multiplies, as in products.cu
_WARP_ROW_BYTES = 6144  # measured: a longer row is read faster by more warps
_ENOUGH_WARPS = 2048  # that a device is busy with; below it a warp takes one row, so that there are more of them


@frozen
class Tiling:
    """How a product is cut: 1 << `split` warps share `rows` rows, for `tokens` tokens at once.

    The split depends on the row's bytes alone, because the order of a sum does on the split.
    """

    split: int
    rows: int
    tokens: int

    @classmethod
    def of(cls, row_bytes: int, row_count: int, tokens: int, most_rows: int) -> Tiling:
        """For `row_count` rows in all, each for up to `tokens` tokens."""
        split = min(max(-(-row_bytes // _WARP_ROW_BYTES) - 1, 0).bit_length(), 3)
        if tokens > 1:
            return cls(split, 1, TOKENS_AT_ONCE)
        warps = (row_count << split) // most_rows
        return cls(split, most_rows if warps >= _ENOUGH_WARPS else 1, 1)

    def blocks(self, row_count: int) -> int:
        """Blocks of THREADS threads for so many rows."""
        return -(-row_count // ((_WARPS >> self.split) * self.rows))


THREADS = 32 * _WARPS
"""Threads of a block that multiplies."""

MULTIPLY_ROWS, GATE_UP_ROWS, DOWN_ROWS = 4, 2, 4
"""The most rows that a warp takes at once, measured; two matrices have so many each in `gate_up`."""


class Kernels:
    """Kernels for one device, which is current whenever one is asked for. Each is `kernel(grid, block, args, ...)`.

    Integers and floats of the arguments are 64 bits wide, so that Python's own can be passed.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}

    def layer(self, name: str) -> Any:
        """A kernel of layer.cu that has no parameters."""
        return self._function("layer.cu", name, ())

    def attention(self, head_size: int) -> Any:
        """Attention for heads of that size."""
        name = f"attention<{head_size}>"
        return self._function("layer.cu", name, (name,))

    def multiply(self, type_name: str, tiling: Tiling) -> Any:
        """Products of resident matrices."""
        return self._product(type_name, f"multiply<{type_name}, {tiling.rows}, {tiling.tokens}>")

    def embed(self, type_name: str) -> Any:
        """Rows of a table as floats."""
        return self._product(type_name, f"embed<{type_name}>")

    def down(self, type_name: str, tiling: Tiling) -> Any:
        """The last projection of experts."""
        return self._product(type_name, f"down<{type_name}, {tiling.rows}, {tiling.tokens}>")

    def gate_up(self, gate_type: str, up_type: str, tiling: Tiling) -> Any:
        """The first two projections of experts, and the gating."""
        name = f"gate_up<{gate_type}, {up_type}, {tiling.rows}, {tiling.tokens}>"
        if gate_type == up_type:
            return self._product(gate_type, name)
        return self._function("products.cu", name, (name,))

    def _product(self, type_name: str, name: str) -> Any:
        """All kernels of one type are compiled together."""
        t = type_name
        names = [f"embed<{t}>"]
        for kind, most_rows in (
            (f"multiply<{t}", MULTIPLY_ROWS),
            (f"gate_up<{t}, {t}", GATE_UP_ROWS),
            (f"down<{t}", DOWN_ROWS),
        ):
            names += [f"{kind}, {most_rows}, 1>", f"{kind}, 1, 1>", f"{kind}, 1, {TOKENS_AT_ONCE}>"]
        return self._function("products.cu", name, tuple(names))

    def _function(self, file: str, name: str, names: tuple[str, ...]) -> Any:
        function = self._functions.get(name)
        if function is None:
            module = cupy.RawModule(
                code=_source(file), options=("-std=c++17",), backend="nvrtc", name_expressions=names or None
            )
            for each in names or (name,):
                self._functions[each] = module.get_function(each).kernel
            function = self._functions[name]
        return function


@cache
def _source(file: str) -> str:
    here = resources.files(__name__)
    text = here.joinpath(file).read_text()
    return here.joinpath("weights.cuh").read_text() + text if file == "products.cu" else text
