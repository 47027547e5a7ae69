"""The arithmetic that models are written over, once for every array library.

All activations are float32 arrays of shape (tokens, columns), C-contiguous, of the implementation's own array library.
Weights stay in the bytes the file has. Ids, shares, addresses, starts, tokens and places are numpy's whatever the
library: they say which experts are wanted. One Ops serves one generation at a time, from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
T = TypeVar("T")


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


@frozen(kw_only=True)
class KernelShapes:
    """What a model multiplies with, where kernels are compiled for shapes and not for types alone.

    `matrices` are type and columns of its resident matrices, `table` is the type of its embedding, `ffns` are those of
    its layers, and `head_size` is the elements of an attention head. What is left out is not compiled beforehand.
    """

    matrices: frozenset[tuple[str, int]] = frozenset()
    table: str | None = None
    ffns: frozenset[ExpertFfn] = frozenset()
    head_size: int | None = None


NO_SHAPES = KernelShapes()


class Ops(Protocol):
    """What a model asks of an array library. Each result is a new array unless it says otherwise."""

    @property
    def stream(self) -> int | None:
        """Where its work is launched in order, as backends are told of streams; None where calls return when done."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of a device's own memory that it holds, freed arrays kept for reuse included; 0 on the host."""
        ...

    def prepare(
        self, type_names: Collection[str], progress: Callable[[str], None], shapes: KernelShapes = NO_SHAPES
    ) -> None:
        """Compile what weights of these ggml types and shapes need, calling `progress` with a name before each one.

        A pass compiles nothing then; what it needs of other shapes is compiled when it is met.

        Raises UnsupportedCheckpoint for a type without a kernel, naming it and the supported ones.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def place(self, data: U8) -> U8:
        """Resident weights, given in host memory, where kernels read them; the same array where that is the same."""
        ...

    def array(self, host: F32) -> F32:
        """A float32 array of the host's, of any shape, where kernels read it; the same array where that is the same."""
        ...

    def to_host(self, x: F32) -> F32:
        """The finished x as a numpy array; the same one where it is one."""
        ...

    def empty(self, *shape: int) -> F32:
        """Floats of that shape and undefined content."""
        ...

    def zeros(self, *shape: int) -> F32:
        """Zeros of that shape."""
        ...

    def position(self, first: int) -> Any:
        """That number where kernels read it: what `rows`, `append` and `attention` take. Good until the next one."""
        ...

    def repeated(self, key: Hashable, work: Callable[[], T]) -> T:
        """What `work` returns: arrays that are valid until the next call with that key.

        A device may record what is launched and replay it at later calls, without calling `work`. So it calls methods
        that launch and nothing else, and takes arrays that lie in the same memory at every call.
        """
        ...

    def copy(self, out: F32, x: F32) -> None:
        """out[:] = x."""
        ...

    def rows(self, table: F32, first_position: Any, count: int) -> F32:
        """`count` rows of the table from that position on."""
        ...

    def add(self, total: F32, addend: F32) -> None:
        """total += addend, in place."""
        ...

    def append(self, cache: F32, rows: F32, first_position: Any) -> None:
        """Put rows, (tokens, kv heads, head size), into cache, (kv heads, capacity, head size), from there on."""
        ...

    def scatter(self, out: F32, places: I64, rows: F32) -> None:
        """out[places[i]] = rows[i], in place."""
        ...

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

    def attention(self, q: F32, keys: F32, values: F32, first_position: Any, scale: float) -> F32:
        """Causal attention of q, (tokens, heads, head size), from `first_position` on: (tokens, heads * head size).

        keys and values: (kv heads, capacity, head size), filled up to first_position + tokens.
        """
        ...

    def top_k(self, logits: F32, k: int, normalize: bool) -> tuple[I64, F32]:
        """Softmax over all experts, then the k best of each token: ids and weights, (tokens, k), best first, of numpy.

        Equal logits go to the lower id. Normalized weights sum to one.
        """
        ...

    def routed_ffn(self, ffn: ExpertFfn, addresses: I64, x: F32, starts: I64, tokens: I64) -> F32:
        """Expert e applied to rows tokens[starts[e]:starts[e + 1]] of x, for each e: (len(tokens), down rows).

        `addresses`, shape (experts, 3), are where gate, up and down of each expert begin in readable slots.
        The result's row i belongs to tokens[i]. A row does not depend on what else is in the call.
        """
        ...

    def add_routed_token(self, total: F32, ffn: ExpertFfn, addresses: I64, x: F32, weights: F32) -> None:
        """total += the sum of weights[e] * expert e applied to x, summed in the order of e; total and x are one row.

        Bit for bit what `routed_ffn`, `add_weighted` to zeros and `add` give.
        """
        ...

    def add_weighted(self, total: F32, rows: F32, tokens: I64, weights: F32) -> None:
        """total[tokens[i]] += weights[i] * rows[i], in place, in the order of i."""
        ...
