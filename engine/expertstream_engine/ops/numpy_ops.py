"""Ops in plain numpy: slow, short, and the oracle of the others.

Weights are dequantized by the gguf package. Activations are rounded as ggml's dot products do; the sums run
over one token at a time, so that a row does not depend on what else is in the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self

import numpy as np
from gguf import GGMLQuantizationType, quants

from expertstream_engine.ops import checks
from expertstream_engine.ops.host_arrays import HostArrays
from expertstream_engine.ops.protocol import (
    F32,
    I64,
    NO_SHAPES,
    U8,
    ExpertFfn,
    KernelShapes,
    Projection,
    QuantMatrix,
)


class NumpyOps(HostArrays):
    """An Ops that needs no compiler; it holds nothing but what it is given."""

    def prepare(
        self, type_names: Collection[str], progress: Callable[[str], None], shapes: KernelShapes = NO_SHAPES
    ) -> None:
        checks.check_types(type_names, _ROUNDING)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def embed(self, table: QuantMatrix, ids: I64) -> F32:
        checks.check_integers("ids", ids, 1)
        if ids.size and not 0 <= ids.min() <= ids.max() < table.rows:
            raise checks.bad_range("ids")
        return dequantize(table.type_name, table.data[ids])

    def rms_norm(self, x: F32, weight: F32, epsilon: float) -> F32:
        checks.check_rms_norm(x, weight)
        wide = x.astype(np.float64)
        normed: F32 = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * weight).astype(np.float32)
        return normed

    def matmul(self, x: F32, *matrices: QuantMatrix) -> list[F32]:
        checks.check_matmul(x, matrices)
        return [_matmul(x, matrix.type_name, matrix.data) for matrix in matrices]

    def rope(self, x: F32, cos: F32, sin: F32, interleaved: bool) -> None:
        checks.check_rope(x, cos, sin)
        pairs = cos.shape[1]
        first = x[:, :, : 2 * pairs : 2] if interleaved else x[:, :, :pairs]
        second = x[:, :, 1 : 2 * pairs : 2] if interleaved else x[:, :, pairs : 2 * pairs]
        c, s = cos[:, None, :], sin[:, None, :]
        first[...], second[...] = first * c - second * s, first * s + second * c

    def attention(self, q: F32, keys: F32, values: F32, first_position: int, scale: float) -> F32:
        checks.check_attention(q, keys, values, first_position)
        tokens, heads, head_size = q.shape
        group = heads // keys.shape[0]
        out = np.empty((tokens, heads, head_size), np.float32)
        for token, head in np.ndindex(tokens, heads):
            seen = first_position + token + 1
            scores = keys[head // group, :seen].astype(np.float64) @ q[token, head] * scale
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ values[head // group, :seen] / weights.sum()
        return out.reshape(tokens, heads * head_size)

    def top_k(self, logits: F32, k: int, normalize: bool) -> tuple[I64, F32]:
        checks.check_top_k(logits, k)
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :k].astype(np.int64)
        shares = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
        chosen = np.take_along_axis(shares, ids, 1)
        return ids, (chosen / (chosen if normalize else shares).sum(1, keepdims=True)).astype(np.float32)

    def routed_ffn(self, ffn: ExpertFfn, addresses: I64, x: F32, starts: I64, tokens: I64) -> F32:
        checks.check_routed(ffn, addresses, x, starts, tokens)
        if starts[0] or starts[-1] != tokens.size or (np.diff(starts) < 0).any():
            raise checks.bad_range("starts")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < x.shape[0]:
            raise checks.bad_range("tokens")
        out = np.empty((tokens.size, ffn.down.rows), np.float32)
        for expert in np.flatnonzero(np.diff(starts)):
            mine = slice(starts[expert], starts[expert + 1])
            gate, up, down = map(_bytes_at, addresses[expert], (ffn.gate, ffn.up, ffn.down))
            wanted = x[tokens[mine]]
            hidden = _silu(_matmul(wanted, ffn.gate.type_name, gate)) * _matmul(wanted, ffn.up.type_name, up)
            out[mine] = _matmul(hidden, ffn.down.type_name, down)
        return out

    def add_weighted(self, total: F32, rows: F32, tokens: I64, weights: F32) -> None:
        checks.check_add_weighted(total, rows, tokens, weights)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < total.shape[0]:
            raise checks.bad_range("tokens")
        for token, weight, row in zip(tokens, weights, rows, strict=True):
            total[token] += weight * row


def dequantize(type_name: str, data: U8) -> F32:
    """Weights in float32, of shape (rows, columns), from their bytes, of shape (rows, bytes of a row)."""
    kind = GGMLQuantizationType[type_name]
    if not len(data):  # which gguf cannot reshape
        return np.empty(quants.quant_shape_from_byte_shape(data.shape, kind), np.float32)
    values: F32 = quants.dequantize(np.ascontiguousarray(data), kind)
    return values.astype(np.float32, copy=False)


def _matmul(x: F32, type_name: str, data: U8) -> F32:
    weights, rounded = dequantize(type_name, data), _ROUNDING[type_name](x)
    return np.stack([weights @ row for row in rounded]) if len(x) else np.empty((0, len(data)), np.float32)


def _bytes_at(address: int, part: Projection) -> U8:
    room = (ctypes.c_uint8 * (part.rows * part.row_bytes)).from_address(int(address))
    return np.ctypeslib.as_array(room).reshape(part.rows, part.row_bytes)


def _silu(x: F32) -> F32:
    with np.errstate(over="ignore"):  # exp(-x) is inf where silu(x) is 0
        silu: F32 = x / (1 + np.exp(-x))
    return silu


def _exact(x: F32) -> F32:
    return x


def _through_f16(x: F32) -> F32:
    return x.astype(np.float16).astype(np.float32)


def _through_bf16(x: F32) -> F32:
    bf16 = GGMLQuantizationType.BF16
    values: F32 = quants.dequantize(quants.quantize(x, bf16), bf16)
    return values.reshape(x.shape)


def _through_q8_0(x: F32) -> F32:
    """Blocks of 32: d = max|x| / 127, rounded half away from zero, and d itself to float16 afterwards."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    d = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    scaled = blocks * _quotient(1, d)
    whole = np.trunc(scaled)
    whole += np.where(np.abs(scaled - whole) >= 0.5, np.sign(scaled), np.float32(0))
    rounded: F32 = whole * d.astype(np.float16).astype(np.float32)
    return rounded.reshape(x.shape)


def _through_q8_k(x: F32) -> F32:
    """Blocks of 256: the value of largest magnitude becomes -127, rounded half to even; 127 is the ceiling."""
    blocks = x.reshape(*x.shape[:-1], -1, 256)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
    inverse = _quotient(-127, peak)
    rounded: F32 = np.minimum(np.rint(blocks * inverse), np.float32(127)) * _quotient(1, inverse)
    return rounded.reshape(x.shape)


def _quotient(numerator: float, divisor: F32) -> F32:
    """Of zero it is zero; of what is too small it is the largest float32."""
    largest = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        quotient = np.divide(np.float32(numerator), divisor, out=np.zeros_like(divisor), where=divisor != 0)
    return np.clip(quotient, -largest, largest)


_ROUNDING: dict[str, Callable[[F32], F32]] = {
    "F32": _exact,
    "F16": _through_f16,
    "BF16": _through_bf16,
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "MXFP4"), _through_q8_0),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), _through_q8_k),
}
"""How ggml rounds activations before the dot product with weights of each type."""
