"""The arithmetic that models are written over, once for every array library.

All activations are float32 arrays of shape (tokens, columns), C-contiguous. Weights stay in the bytes the
file has. One Ops object serves one generation at a time: its methods are called from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


@frozen(eq=False)
class QuantMatrix:
    """A resident weight matrix in the file's own bytes: `data` is uint8 of shape (rows, bytes of a row)."""

    type_name: str
    columns: int
    data: U8

    @property
    def rows(self) -> int:
        """How many rows, which is how many outputs."""
        return int(self.data.shape[0])


@frozen
class Projection:
    """The type and shape of one projection of an expert: `rows` outputs of `columns` inputs."""

    type_name: str
    rows: int
    columns: int
    row_bytes: int


@frozen
class ExpertFfn:
    """The gated FFN of every expert of one layer: down(silu(gate(x)) * up(x)); gate and up share a shape."""

    gate: Projection
    up: Projection
    down: Projection


class Ops(Protocol):
    """What a model asks of an array library. Each result is a new array unless it says otherwise."""

    def prepare(self, type_names: Collection[str], progress: Callable[[str], None]) -> None:
        """Compile what weights of these ggml types need, calling `progress` with a name before each one.

        Raises UnsupportedCheckpoint for a type without a kernel, naming it and the supported ones.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def embed(self, table: QuantMatrix, ids: I64) -> F32:
        """Rows `ids` of the table, dequantized: shape (tokens, columns)."""
        ...

    def rms_norm(self, x: F32, weight: F32, epsilon: float) -> F32:
        """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, which is as long as `weight`; any shape."""
        ...

    def matmul(self, x: F32, *matrices: QuantMatrix) -> list[F32]:
        """x @ matrix.T for each matrix: (tokens, rows). Activations are rounded as llama.cpp does for the type."""
        ...

    def rope(self, x: F32, cos: F32, sin: F32, interleaved: bool) -> None:
        """Rotate x, shape (tokens, heads, head size), in place; cos and sin have shape (tokens, rotated / 2).

        Pairs are (i, i + rotated / 2), or (2i, 2i + 1) when interleaved; columns past `rotated` stay.
        """
        ...

    def attention(self, q: F32, keys: F32, values: F32, first_position: int, scale: float) -> F32:
        """Causal attention of q, (tokens, heads, head size), from `first_position` on: (tokens, heads * head size).

        keys and values: (kv heads, capacity, head size), filled up to first_position + tokens.
        """
        ...

    def top_k(self, logits: F32, k: int, normalize: bool) -> tuple[I64, F32]:
        """Softmax over all experts, then the k best of each token: ids and weights, (tokens, k), best first.

        Equal logits go to the lower id. Normalized weights sum to one.
        """
        ...

    def routed_ffn(self, ffn: ExpertFfn, addresses: I64, x: F32, starts: I64, tokens: I64) -> F32:
        """Expert e applied to rows tokens[starts[e]:starts[e + 1]] of x, for each e: (len(tokens), down rows).

        `addresses`, shape (experts, 3), are where gate, up and down of each expert begin in readable slots.
        The result's row i belongs to tokens[i]. A row does not depend on what else is in the call.
        """
        ...

    def add_weighted(self, total: F32, rows: F32, tokens: I64, weights: F32) -> None:
        """total[tokens[i]] += weights[i] * rows[i], in place, in the order of i."""
        ...
