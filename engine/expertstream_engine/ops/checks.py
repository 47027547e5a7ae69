"""What every implementation of Ops refuses alike: arrays and shapes that do not belong together.

Checks are few comparisons a call, because a token makes hundreds of calls.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from expertstream.errors import UnsupportedCheckpoint, UsageError
from expertstream_engine.ops.protocol import F32, I64, ExpertFfn, QuantMatrix

_FLOAT32 = np.dtype(np.float32)
_INT64 = np.dtype(np.int64)


def check_types(type_names: Collection[str], supported: Collection[str]) -> None:
    """Raise UnsupportedCheckpoint if a weight type has no kernel."""
    missing = sorted(set(type_names) - set(supported))
    if missing:
        raise UnsupportedCheckpoint(
            f"no kernel for weights of type {', '.join(missing)}; supported are {', '.join(sorted(supported))}"
        )


def check_floats(name: str, array: F32, dimensions: int) -> None:
    """Raise UsageError unless `array` is float32, C-contiguous and has that many dimensions."""
    if array.dtype != _FLOAT32 or array.ndim != dimensions or not array.flags.c_contiguous:
        raise UsageError(
            f"{name} must be a C-contiguous float32 array of {dimensions} dimensions, "
            f"not {array.dtype} of shape {array.shape}"
        )


def check_integers(name: str, array: I64, dimensions: int) -> None:
    """Raise UsageError unless `array` is int64, C-contiguous and has that many dimensions."""
    if array.dtype != _INT64 or array.ndim != dimensions or not array.flags.c_contiguous:
        raise UsageError(
            f"{name} must be a C-contiguous int64 array of {dimensions} dimensions, "
            f"not {array.dtype} of shape {array.shape}"
        )


def check_matmul(x: F32, matrices: tuple[QuantMatrix, ...]) -> None:
    """Raise UsageError unless x is (tokens, columns) and every matrix has those columns."""
    check_floats("x", x, 2)
    columns = x.shape[1]
    if not matrices:
        raise UsageError("there is no matrix to multiply by")
    for matrix in matrices:
        if matrix.columns != columns:
            raise UsageError(f"x has {columns} columns, a {matrix.type_name} matrix has {matrix.columns}")


def check_rms_norm(x: F32, weight: F32) -> None:
    """Raise UsageError unless the weight is as long as the last axis of x."""
    check_floats("x", x, x.ndim)
    check_floats("weight", weight, 1)
    if not weight.size or x.shape[-1:] != weight.shape:
        raise UsageError(f"x of shape {x.shape} cannot be normalized by a weight of {weight.shape[0]}")


def check_rope(x: F32, cos: F32, sin: F32) -> None:
    """Raise UsageError unless there is one angle for each token and each pair that is rotated."""
    check_floats("x", x, 3)
    check_floats("cos", cos, 2)
    check_floats("sin", sin, 2)
    if cos.shape != sin.shape or cos.shape[0] != x.shape[0] or 2 * cos.shape[1] > x.shape[2]:
        raise UsageError(f"x of shape {x.shape} cannot be rotated by cos {cos.shape} and sin {sin.shape}")


def check_attention(q: F32, keys: F32, values: F32, first_position: int) -> None:
    """Raise UsageError unless q's heads share the kv heads evenly and its positions lie within the capacity."""
    check_floats("q", q, 3)
    check_floats("keys", keys, 3)
    check_floats("values", values, 3)
    tokens, heads, head_size = q.shape
    kv_heads, capacity, _ = keys.shape
    if keys.shape != values.shape or keys.shape[2] != head_size or not kv_heads or heads % kv_heads:
        raise UsageError(f"q of shape {q.shape} does not fit keys {keys.shape} and values {values.shape}")
    if first_position < 0 or first_position + tokens > capacity:
        raise UsageError(f"{tokens} tokens from position {first_position} do not fit a cache of {capacity} positions")


def check_top_k(logits: F32, k: int) -> None:
    """Raise UsageError unless k of the logits can be chosen."""
    check_floats("logits", logits, 2)
    if not 1 <= k <= logits.shape[1]:
        raise UsageError(f"cannot choose {k} of {logits.shape[1]} experts")


def check_routed(ffn: ExpertFfn, addresses: I64, x: F32, starts: I64, tokens: I64) -> None:
    """Raise UsageError unless shapes agree; the values of `starts` and `tokens` are not looked at."""
    check_integers("addresses", addresses, 2)
    check_floats("x", x, 2)
    check_integers("starts", starts, 1)
    check_integers("tokens", tokens, 1)
    gate, up, down = ffn.gate, ffn.up, ffn.down
    if (gate.rows, gate.columns) != (up.rows, up.columns) or gate.rows != down.columns:
        raise UsageError(f"gate, up and down do not follow one another: {gate}, {up}, {down}")
    if x.shape[1] != gate.columns:
        raise UsageError(f"x has {x.shape[1]} columns, the experts have {gate.columns}")
    if addresses.shape[1] != 3 or starts.shape[0] != addresses.shape[0] + 1:
        raise UsageError(f"addresses of shape {addresses.shape} do not go with {starts.shape[0]} starts")


def check_add_weighted(total: F32, rows: F32, tokens: I64, weights: F32) -> None:
    """Raise UsageError unless there is one token and one weight for each row; token numbers are not looked at."""
    check_floats("total", total, 2)
    check_floats("rows", rows, 2)
    check_integers("tokens", tokens, 1)
    check_floats("weights", weights, 1)
    if rows.shape[1] != total.shape[1] or not rows.shape[0] == tokens.shape[0] == weights.shape[0]:
        raise UsageError(
            f"cannot add rows {rows.shape} to {total.shape} by {tokens.shape[0]} tokens and {weights.shape[0]} weights"
        )


def bad_range(what: str) -> UsageError:
    """The error for indices that reach outside their array."""
    return UsageError(f"{what} reaches outside its array")
