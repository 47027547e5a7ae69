"""Compiled kernels by type: dot products of weight rows with activations, and the rounding of activations.

A kernel is compiled by numba when first asked for, cached on disk, and kept for the process. It is a plain C
function that runs without the GIL, allocates nothing and may be called from any number of threads at once.

    rows(weights, row_bytes, first_row, last_row, columns, activations, activation_bytes, tokens, out, out_stride)
    round_rows(x, x_stride, columns, tokens, out, out_bytes)

All arguments are 64-bit integers. `weights` is the address of row 0, which may be misaligned to anything; float32
out[t * out_stride + r] becomes row r times the record at activations + t * activation_bytes, for r in
[first_row, last_row) and t in [0, tokens). It does not depend, in any bit, on the other rows and tokens of the call.
`round_rows` writes the record of float32 x[t * x_stride : t * x_stride + columns] at out + t * out_bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from attrs import frozen
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from expertstream.compiling import Compiler
from expertstream.errors import UnsupportedCheckpoint
from expertstream_engine.kernels import activations, row_dots, vector_ir
from expertstream_engine.kernels.activations import ROUNDINGS
from expertstream_engine.kernels.row_dots import ROW_DOTS
from expertstream_engine.kernels.vector_ir import F32, FLAVOURS, I8, I64, Target, Value, VectorBuilder, flavours_for

SUPPORTED_TYPES: tuple[str, ...] = tuple(ROW_DOTS)
"""The ggml weight types that have a kernel."""

_TOKENS_AT_ONCE = 4
"""Tokens for which a block of weights is unpacked once; more would not fit the registers."""
_ROWS_AT_ONCE = 16
"""Rows that stay in the nearest caches while all tokens pass over them."""


@frozen
class WeightKernel:
    """The address of the `rows` function of a weight type, and the format its activations must have."""

    type_name: str
    address: int
    activation: str


@frozen
class ActivationKernel:
    """The address of the `round_rows` function of an activation format."""

    name: str
    address: int

    def bytes_for(self, columns: int) -> int:
        """Bytes of the record of one token, a multiple of 64."""
        return ROUNDINGS[self.name].record_bytes(columns)


def weight_kernel(type_name: str) -> WeightKernel:
    """The kernel of a weight type; the first request compiles it or loads it from numba's cache.

    Any thread; raises UnsupportedCheckpoint for a type without a kernel.
    """
    row_dot = _row_dot(type_name)
    return WeightKernel(type_name, _address("rows", type_name), row_dot.activation)


def activation_kernel(name: str) -> ActivationKernel:
    """The kernel of an activation format that a `WeightKernel` names. Any thread."""
    return ActivationKernel(name, _address("round_rows", name))


def check_columns(type_name: str, columns: int) -> None:
    """Raise UnsupportedCheckpoint unless rows of so many columns of this type are whole blocks.

    The kernels do not look: they would leave the last columns out.
    """
    block_columns = _row_dot(type_name).block_columns
    if columns <= 0 or columns % block_columns:
        raise UnsupportedCheckpoint(
            f"a row of {columns} columns of type {type_name} is not a whole number of its blocks of {block_columns}"
        )


def compile_kernel(kind: str, name: str, flavour: str) -> Any:
    """A numba cfunc of `kind` "rows" or "round_rows", whose dot products take a given flavour; for tests."""
    # The cache tells functions apart by file, name, closure and CPU. The name gives each its own index, because
    # processes that fill one index at once may swap its entries.
    kernel = f"{kind} {name} {flavour}"
    function, signature = (_rows(kernel), _ROWS) if kind == "rows" else (_round_rows(kernel), _ROUND_ROWS)
    function.__qualname__ = function.__name__ = f"{kind}_{name}_{flavour}"
    return _compiler.cfunc(signature, cache=True)(function)


_compiler = Compiler(__file__, *(str(module.__file__) for module in (vector_ir, row_dots, activations)))

_ROWS = types.void(*[types.intp] * 10)
_ROUND_ROWS = types.void(*[types.intp] * 6)

_lock = threading.Lock()
_compiled: dict[tuple[str, str], Any] = {}


def _address(kind: str, name: str) -> int:
    with _lock:
        if (kind, name) not in _compiled:
            _compiled[kind, name] = compile_kernel(kind, name, flavours_for(Target.of_numba())[0])
        return int(_compiled[kind, name].address)


def _row_dot(type_name: str) -> row_dots.RowDot:
    try:
        return ROW_DOTS[type_name]
    except KeyError:
        supported = ", ".join(SUPPORTED_TYPES)
        raise UnsupportedCheckpoint(f"no kernel for weights of type {type_name}; there are {supported}") from None


_literal_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic(prefer_literal=True)


def _rows(kernel: str) -> Callable[..., None]:
    def rows(
        weights: int,
        row_bytes: int,
        first_row: int,
        last_row: int,
        columns: int,
        activations: int,
        activation_bytes: int,
        tokens: int,
        out: int,
        out_stride: int,
    ) -> None:
        blocked = tokens - tokens % _TOKENS_AT_ONCE
        for first in range(first_row, last_row, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, last_row)
            for token in range(0, blocked, _TOKENS_AT_ONCE):
                record = activations + token * activation_bytes
                for row in range(first, last):
                    _dot(
                        kernel,
                        _TOKENS_AT_ONCE,
                        weights + row * row_bytes,
                        columns,
                        record,
                        activation_bytes,
                        out + 4 * (token * out_stride + row),
                        4 * out_stride,
                    )
            for token in range(blocked, tokens):
                record = activations + token * activation_bytes
                for row in range(first, last):
                    _dot(
                        kernel,
                        1,
                        weights + row * row_bytes,
                        columns,
                        record,
                        activation_bytes,
                        out + 4 * (token * out_stride + row),
                        4 * out_stride,
                    )

    return rows


def _round_rows(kernel: str) -> Callable[..., None]:
    def round_rows(x: int, x_stride: int, columns: int, tokens: int, out: int, out_bytes: int) -> None:
        for token in range(tokens):
            _round(kernel, x + 4 * token * x_stride, columns, out + token * out_bytes)

    return round_rows


@_literal_intrinsic
def _dot(
    typing_context: Any,
    kernel: Any,
    token_count: Any,
    row: Any,
    columns: Any,
    record: Any,
    record_bytes: Any,
    out: Any,
    out_bytes: Any,
) -> Any:
    """Dot products of one row with `token_count` records; `out_bytes` lie between their results."""

    def generate(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
        name, code = _open(kernel, builder)
        _, _, row, columns, record, record_bytes, out, out_bytes = arguments
        steps = [ir.Constant(I64, t) for t in range(token_count.literal_value)]
        records = [_pointer(builder, builder.add(record, builder.mul(record_bytes, step))) for step in steps]
        results = ROW_DOTS[name].emit(code, _pointer(builder, row), columns, records)
        for step, result in zip(steps, results, strict=True):
            place = _pointer(builder, builder.add(out, builder.mul(out_bytes, step)))
            builder.store(result, builder.bitcast(place, F32.as_pointer()))
        return context.get_dummy_value()

    return types.void(kernel, token_count, *[types.intp] * 6), generate


@_literal_intrinsic
def _round(typing_context: Any, kernel: Any, x: Any, columns: Any, record: Any) -> Any:
    """Round one token's activations into a record."""

    def generate(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
        name, code = _open(kernel, builder)
        _, x, columns, record = arguments
        ROUNDINGS[name].emit(code, _pointer(builder, x), columns, _pointer(builder, record))
        return context.get_dummy_value()

    return types.void(kernel, *[types.intp] * 3), generate


def _open(kernel: Any, builder: Value) -> tuple[str, VectorBuilder]:
    _, name, flavour = kernel.literal_value.split()
    return name, FLAVOURS[flavour](builder, Target.of_numba())


def _pointer(builder: Value, address: Value) -> Value:
    return builder.inttoptr(address, I8.as_pointer())
