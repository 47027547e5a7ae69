"""The records that activations are rounded to before a dot product, and the code that rounds one.

A record is structure of arrays: quants first, then sums, then scales, each as long as the columns say. Rounding follows
the reference of ggml (`quantize_row_q8_0_ref`, `quantize_row_q8_K_ref` in ggml-quants.c, MIT), which llama.cpp applies.
Like there, an infinity makes its results NaN. So does a NaN, which is lost there in Q8_0 and Q8_K: damaged weights are
to be noticed. What their quants are then is undefined and means nothing, because the scale is NaN.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen
from llvmlite import ir

from expertstream_engine.kernels.vector_ir import F32, I1, I8, I16, I32, I64, LANES, Value, VectorBuilder, vector

RECORD_ALIGNMENT_BYTES = 64
"""Records begin at multiples of a cache line, if the first one does."""


@frozen
class Rounding:
    """The size of a record, and the code that writes one.

    `emit(code, x, columns, record)` gets a builder, the byte pointer of the float32 numbers, how many (i64), and
    the byte pointer of the record.
    """

    block_columns: int
    block_bytes: int
    emit: Callable[[VectorBuilder, Value, Value, Value], None]

    def record_bytes(self, columns: int) -> int:
        """Bytes of one record of so many columns, a multiple of RECORD_ALIGNMENT_BYTES."""
        filled = columns // self.block_columns * self.block_bytes
        return -(-filled // RECORD_ALIGNMENT_BYTES) * RECORD_ALIGNMENT_BYTES


def _floats(rounded: Callable[[VectorBuilder, Value], Value]) -> Rounding:
    """Records of float32 that hold rounded numbers: a dot product then need not widen them for every row."""

    def emit(code: VectorBuilder, x: Value, columns: Value, record: Value) -> None:
        builder = code.builder
        whole = builder.and_(columns, ir.Constant(I64, -LANES))

        def convert(first: Value, count: int) -> None:
            floats = code.load(x, vector(F32, count), code.times(first, 4))
            code.store(rounded(code, floats), record, code.times(first, 4))

        with code.loop(builder.lshr(whole, ir.Constant(I64, 3))) as i:
            convert(code.times(i, LANES), LANES)
        with code.loop(builder.sub(columns, whole)) as i:
            convert(builder.add(whole, i), 1)

    return Rounding(1, 4, emit)


def _emit_q8_0(code: VectorBuilder, x: Value, columns: Value, record: Value) -> None:
    """Blocks of 32: scale = max|x| / 127, quants to the nearest with halves away from zero, the scale then to half."""
    builder, block, one = code.builder, vector(F32, 32), vector(F32, 1)
    with code.loop(builder.lshr(columns, ir.Constant(I64, 5))) as i:
        values = code.load(x, block, code.times(i, 4 * 32))
        scale = builder.fdiv(code.largest_magnitude(code.magnitude(values)), ir.Constant(F32, 127.0))
        is_zero = builder.fcmp_ordered("==", scale, ir.Constant(F32, 0.0))
        inverse = code.limit_to_finite(builder.fdiv(ir.Constant(F32, 1.0), scale))
        inverse = builder.select(is_zero, ir.Constant(F32, 0.0), inverse)
        scaled = builder.fmul(values, code.splat(inverse, 32))
        # Adding the float below one half, and not one half, keeps what is just below a half below it.
        sign = builder.and_(builder.bitcast(scaled, vector(I32, 32)), code.constant(vector(I32, 32), 0x80000000))
        below_half = builder.bitcast(builder.or_(sign, code.constant(vector(I32, 32), 0x3EFFFFFF)), block)
        quants = builder.fptosi(builder.fadd(scaled, below_half), vector(I32, 32))
        code.store(builder.trunc(quants, vector(I8, 32)), record, code.times(i, 32))
        rounded = code.half_to_float(code.float_to_half(builder.bitcast(scale, one)))
        code.store(rounded, record, builder.add(columns, code.times(i, 4)))


def _emit_q8_k(code: VectorBuilder, x: Value, columns: Value, record: Value) -> None:
    """Blocks of 256: the first x of the largest |x| becomes -127, quants to the nearest with halves to even.

    The sums are of 16 quants each, in 16 bits; a block has those of its even sixteens first, then of its odd ones.
    """
    builder, part = code.builder, vector(F32, 16)
    sums = columns
    scales = builder.add(columns, builder.lshr(columns, ir.Constant(I64, 3)))
    with code.loop(builder.lshr(columns, ir.Constant(I64, 8))) as i:
        block = code.at(x, code.times(i, 4 * 256))
        extreme = _first_extreme(code, block)
        is_zero = builder.fcmp_ordered("==", extreme, ir.Constant(F32, 0.0))
        inverse = code.limit_to_finite(builder.fdiv(ir.Constant(F32, -127.0), extreme))
        scale = builder.select(is_zero, ir.Constant(F32, 0.0), builder.fdiv(ir.Constant(F32, 1.0), inverse))
        inverse = code.splat(builder.select(is_zero, ir.Constant(F32, 0.0), inverse), 16)
        # In this range floats have a spacing of one, so the addition rounds.
        magic = code.constant(part, 1.5 * 2.0**23)
        with code.loop(16) as sixteen:
            values = code.load(block, part, code.times(sixteen, 4 * 16))
            shifted = builder.fadd(builder.fmul(values, inverse), magic)
            quants = builder.trunc(builder.bitcast(shifted, vector(I32, 16)), vector(I8, 16))
            code.store(quants, record, code.times(builder.add(code.times(i, 16), sixteen), 16))
            odd = builder.and_(sixteen, ir.Constant(I64, 1))
            place = builder.add(builder.lshr(sixteen, ir.Constant(I64, 1)), code.times(odd, 8))
            place = builder.add(sums, builder.add(code.times(i, 32), code.times(place, 2)))
            total = code.call("llvm.vector.reduce.add", I16, builder.sext(quants, vector(I16, 16)))
            code.store(total, record, place)
        code.store(scale, record, builder.add(scales, code.times(i, 4)))


def _first_extreme(code: VectorBuilder, block: Value) -> Value:
    """The first of 256 floats whose magnitude is the largest, with its sign; NaN where there is one."""
    builder, part = code.builder, vector(F32, 16)
    largest = code.variable(code.constant(part, 0.0))
    with code.loop(16) as i:
        magnitudes = code.magnitude(code.load(block, part, code.times(i, 4 * 16)))
        builder.store(code.larger_magnitude(builder.load(largest), magnitudes), largest)
    highest = code.largest_magnitude(builder.load(largest))
    magnitude = code.splat(highest, 16)
    extreme = code.variable(highest)
    # From the end to the beginning, so that the first one is what stays.
    with code.loop(16) as i:
        place = code.at(block, code.times(builder.sub(ir.Constant(I64, 15), i), 4 * 16))
        hits = builder.fcmp_ordered("==", code.magnitude(code.load(place, part)), magnitude)
        hits = builder.bitcast(hits, I16)
        with builder.if_then(builder.icmp_unsigned("!=", hits, ir.Constant(I16, 0))):
            lane = builder.cttz(builder.zext(hits, I64), ir.Constant(I1, 1))
            builder.store(code.load(place, F32, code.times(lane, 4)), extreme)
    return builder.load(extreme)


ROUNDINGS: dict[str, Rounding] = {
    "F32": _floats(lambda code, x: x),
    "F16": _floats(lambda code, x: code.half_to_float(code.float_to_half(x))),
    "BF16": _floats(lambda code, x: code.brain_to_float(code.float_to_brain(x))),
    "Q8_0": Rounding(32, 32 + 4, _emit_q8_0),
    "Q8_K": Rounding(256, 256 + 2 * 16 + 4, _emit_q8_k),
}
"""Every activation format, by the name that weight types refer to."""
