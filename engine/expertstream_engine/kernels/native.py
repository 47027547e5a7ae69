"""What compiled Python has no words for: atomics, memory at an address, calls by address, giving up the core.

Every function here is for use inside numba code only. Addresses are int64. Atomic words are aligned int64;
loads acquire, stores release, and read-modify-write does both.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numba.extending
from llvmlite import ir

from expertstream.compiling import Compiler
from expertstream.errors import MachineError

config: Any = numba.config  # numba fills it in while it is imported, unseen by mypy
if config.DISABLE_JIT:
    raise MachineError(
        "NUMBA_DISABLE_JIT is set, so nothing would be compiled, and what computes here cannot run uncompiled: unset it"
    )

# Jobs are made of each other's functions, across the files of this folder.
_compiler = Compiler(*map(str, sorted(Path(__file__).parent.glob("*.py"))))

# What is compiled is annotated as Python sees it, and not with the narrower numbers of compiled code.
njit: Any = _compiler.njit
cfunc: Any = _compiler.cfunc
intrinsic: Any = numba.extending.intrinsic
types: Any = numba.types

_WORD, _INT32, _VOID = ir.IntType(64), ir.IntType(32), ir.VoidType()

Codegen = Callable[[Any, ir.IRBuilder, Any, list[ir.Value]], ir.Value | None]

usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
"""Sleep for at least that many microseconds (POSIX)."""

sched_yield = types.ExternalFunction("sched_yield", types.int32())
"""Let another thread have this core (POSIX)."""


@intrinsic
def atomic_load(typing: Any, address: Any) -> tuple[Any, Codegen]:
    """The word at `address`; nothing after it is read earlier."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: list[ir.Value]) -> ir.Value:
        return builder.load_atomic(_pointer(builder, args[0], _WORD), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typing: Any, address: Any, value: Any) -> tuple[Any, Codegen]:
    """Write the word at `address`; whoever loads it sees everything written before."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: list[ir.Value]) -> None:
        builder.store_atomic(args[1], _pointer(builder, args[0], _WORD), "release", 8)

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typing: Any, address: Any, value: Any) -> tuple[Any, Codegen]:
    """Add to the word at `address`, and return what it was before."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: list[ir.Value]) -> ir.Value:
        return builder.atomic_rmw("add", _pointer(builder, args[0], _WORD), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_replace(typing: Any, address: Any, expected: Any, value: Any) -> tuple[Any, Codegen]:
    """Write the word at `address` if it is `expected`; True if it was."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: list[ir.Value]) -> ir.Value:
        pair = builder.cmpxchg(_pointer(builder, args[0], _WORD), args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typing: Any) -> tuple[Any, Codegen]:
    """Tell the core that this is a spinning loop; some 15 to 60 ns on x86, next to nothing elsewhere."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: list[ir.Value]) -> None:
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), ir.FunctionType(_VOID, [])), [])
        elif machine in ("aarch64", "arm64"):
            hint = builder.module.declare_intrinsic("llvm.aarch64.hint", (), ir.FunctionType(_VOID, [_INT32]))
            builder.call(hint, [ir.Constant(_INT32, 1)])  # 1 is YIELD

    return types.void(), codegen


@intrinsic
def words_at(typing: Any, address: Any) -> tuple[Any, Codegen]:
    """int64 at `address`, to be indexed; no bounds are checked."""
    return types.CPointer(types.int64)(types.int64), _cast


@intrinsic
def floats_at(typing: Any, address: Any) -> tuple[Any, Codegen]:
    """float32 at `address`, to be indexed; no bounds are checked."""
    return types.CPointer(types.float32)(types.int64), _cast


@intrinsic
def doubles_at(typing: Any, address: Any) -> tuple[Any, Codegen]:
    """float64 at `address`, to be indexed; no bounds are checked."""
    return types.CPointer(types.float64)(types.int64), _cast


@intrinsic
def times_power_of_two(typing: Any, value: Any, power: Any) -> tuple[Any, Codegen]:
    """value * 2**power in float32, for a whole `power` of -252 to 254; over- and underflow as IEEE 754 has it.

    In two factors, because one would overflow before the product does. Loops over it vectorize.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: list[ir.Value]) -> ir.Value:
        whole = builder.fptosi(args[1], _INT32)
        half = builder.ashr(whole, ir.Constant(_INT32, 1))
        product = args[0]
        for part in (half, builder.sub(whole, half)):
            exponent = builder.shl(builder.add(part, ir.Constant(_INT32, 127)), ir.Constant(_INT32, 23))
            product = builder.fmul(product, builder.bitcast(exponent, ir.FloatType()))
        return product

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def call_job(typing: Any, function: Any, args: Any) -> tuple[Any, Codegen]:
    """Call `void function(int64 args)`."""
    return types.void(*[types.int64] * 2), _call


@intrinsic
def call_round_rows(
    typing: Any, function: Any, x: Any, x_stride: Any, columns: Any, tokens: Any, out: Any, out_bytes: Any
) -> tuple[Any, Codegen]:
    """Call an activation kernel; its arguments are told in `expertstream_engine.kernels.registry`."""
    return types.void(*[types.int64] * 7), _call


@intrinsic
def call_rows(
    typing: Any,
    function: Any,
    weights: Any,
    row_bytes: Any,
    first_row: Any,
    last_row: Any,
    columns: Any,
    activations: Any,
    activation_bytes: Any,
    tokens: Any,
    out: Any,
    out_stride: Any,
) -> tuple[Any, Codegen]:
    """Call a weight kernel; its arguments are told in `expertstream_engine.kernels.registry`."""
    return types.void(*[types.int64] * 11), _call


def _pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type) -> ir.Value:
    return builder.inttoptr(address, pointee.as_pointer())


def _cast(context: Any, builder: ir.IRBuilder, sig: Any, args: list[ir.Value]) -> ir.Value:
    return builder.inttoptr(args[0], context.get_value_type(sig.return_type))


def _call(context: Any, builder: ir.IRBuilder, sig: Any, args: list[ir.Value]) -> None:
    function_type = ir.FunctionType(_VOID, [_WORD] * (len(args) - 1))
    builder.call(_pointer(builder, args[0], function_type), args[1:])
