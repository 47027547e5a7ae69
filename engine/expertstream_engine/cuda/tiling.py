"""How a product is cut into lanes, warps and blocks of a CUDA device, by its shape alone."""

from __future__ import annotations

from attrs import frozen

from expertstream_engine.kernels.row_dots import ROW_DOTS

TOKENS_AT_ONCE = 8
"""Tokens for which a row of weights is unpacked once, where there are several."""

_WARPS = 4  # of a block that multiplies, as in products.cu
THREADS = 32 * _WARPS
"""Threads of a block that multiplies."""

_LANES = 32, 16, 8, 4
_STEP_COLUMNS = 64  # that a lane takes at a step
_MOST_IDLE = 1 / 8  # of the lanes that share a row, over all of its steps


@frozen
class Tiling:
    """A product of rows of `columns`: `lanes` lanes of a warp share `rows` rows, for `tokens` tokens at once.

    The lanes depend on the types and the columns alone, because the order of a sum does on them.
    """

    columns: int
    lanes: int
    rows: int
    tokens: int

    @classmethod
    def of(cls, columns: int, tokens: int, *type_names: str) -> Tiling:
        """For rows of matrices of these types that are taken together, each for up to `tokens` tokens."""
        parts = -(-columns // _STEP_COLUMNS)
        busy = [lanes for lanes in _LANES if parts >= (1 - _MOST_IDLE) * lanes * -(-parts // lanes)]
        lanes, rows = (busy or _LANES[-1:])[0], 1
        if any(ROW_DOTS[type_name].block_columns == 1 for type_name in type_names):
            lanes = _LANES[0]
        elif tokens == 1 and (parts <= lanes or (lanes == _LANES[0] and len(type_names) == 1)):
            rows = 2  # measured: short rows leave room for more under way, and long ones share their activations
        return cls(columns, lanes, rows, 1 if tokens == 1 else TOKENS_AT_ONCE)

    def blocks(self, row_count: int) -> int:
        """Blocks of THREADS threads for so many rows."""
        return -(-row_count // (THREADS // self.lanes * self.rows))
