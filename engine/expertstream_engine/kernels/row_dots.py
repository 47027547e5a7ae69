"""The dot product of one weight row with a few activations, for every weight type that has a kernel.

It owns how weights are packed in bytes. Source of the layouts: ggml-common.h and ggml-quants.c of ggml (MIT),
and the package gguf. Activation records are laid out by `activations`; loops over rows are in `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from attrs import frozen
from llvmlite import ir

from expertstream_engine.kernels.vector_ir import (
    BLOCK,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Value,
    VectorBuilder,
    vector,
)

_FLOATS, _INTS, _QUANTS, _SIXTEEN = vector(F32, LANES), vector(I32, LANES), vector(I8, BLOCK), vector(I16, 16)
_SUPERBLOCK = 256
_LINE_BYTES = 64
_PREFETCH_BYTES = 8192  # what a core reads in a few times the memory's latency
_EVEN_THEN_ODD = (*range(0, 16, 2), *range(1, 16, 2))


@frozen
class RowDot:
    """How rows of one type are packed, how activations must be rounded, and the code of a dot product.

    `emit(code, row, columns, activations)` gets a builder, the byte pointer of a row, the columns (i64) and the byte
    pointers of some activation records; it gives one float for each. Each float comes out of the same
    operations in the same order however many records there are.
    """

    block_columns: int
    block_bytes: int
    activation: str
    emit: Callable[[VectorBuilder, Value, Value, Sequence[Value]], list[Value]]


# Floats: 4 accumulators of 8 lanes, and what is left of the columns one at a time. Activations are float32 always.


def _floats(element_bytes: int, activation: str, widen: Callable[[VectorBuilder, Value, Value, int], Value]) -> RowDot:
    def emit(code: VectorBuilder, row: Value, columns: Value, activations: Sequence[Value]) -> list[Value]:
        builder = code.builder

        def add_products(first: Value, accumulators: Sequence[Value], count: int) -> None:
            weights = widen(code, row, code.times(first, element_bytes), count)
            for record, accumulator in zip(activations, accumulators, strict=True):
                _add_product(code, accumulator, weights, code.load(record, vector(F32, count), code.times(first, 4)))

        sums = [[_accumulator(code, LANES) for _ in activations] for _ in range(4)]
        with code.loop(builder.lshr(columns, ir.Constant(I64, 5))) as i:
            _prefetch(code, row, 4 * LANES * element_bytes, code.times(i, 4 * LANES * element_bytes))
            for quarter, accumulators in enumerate(sums):
                first = builder.add(code.times(i, 4 * LANES), ir.Constant(I64, LANES * quarter))
                add_products(first, accumulators, LANES)
        rest = [_accumulator(code, 1) for _ in activations]
        whole = builder.and_(columns, ir.Constant(I64, -4 * LANES))
        with code.loop(builder.sub(columns, whole)) as i:
            add_products(builder.add(whole, i), rest, 1)
        results = []
        for *quarters, last in zip(*sums, rest, strict=True):
            first, second, third, fourth = (builder.load(accumulator) for accumulator in quarters)
            total = code.sum_lanes(builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth)))
            results.append(builder.fadd(total, code.pick(builder.load(last))))
        return results

    return RowDot(1, element_bytes, activation, emit)


def _from_f32(code: VectorBuilder, row: Value, offset: Value, count: int) -> Value:
    return code.load(row, vector(F32, count), offset)


def _from_f16(code: VectorBuilder, row: Value, offset: Value, count: int) -> Value:
    return code.half_to_float(code.load(row, vector(I16, count), offset))


def _from_bf16(code: VectorBuilder, row: Value, offset: Value, count: int) -> Value:
    return code.brain_to_float(code.load(row, vector(I16, count), offset))


# Blocks of 32 with one scale, and activations in Q8_0: scale * dot of signed bytes.


def _blocks(block_bytes: int, unpack: Callable[[VectorBuilder, Value], tuple[Value, Value]]) -> RowDot:
    """`unpack` gives the scale (in all lanes) and the 32 signed quants of the block at a byte pointer."""

    def emit(code: VectorBuilder, row: Value, columns: Value, activations: Sequence[Value]) -> list[Value]:
        builder = code.builder

        def add_block(number: Value, accumulators: Sequence[Value]) -> None:
            weight_scale, weights = unpack(code, code.at(row, code.times(number, block_bytes)))
            scale_offset = builder.add(columns, code.times(number, 4))
            for record, accumulator in zip(activations, accumulators, strict=True):
                dot = code.dot(weights, code.load(record, _QUANTS, code.times(number, BLOCK)))
                scale = builder.fmul(weight_scale, code.splat(code.load(record, F32, scale_offset), LANES))
                _add_product(code, accumulator, scale, builder.sitofp(dot, _FLOATS))

        # Two accumulators in turns, because one would wait for its own last addition.
        evens, odds = ([_accumulator(code, LANES) for _ in activations] for _ in range(2))
        block_count = builder.lshr(columns, ir.Constant(I64, 5))
        with code.loop(builder.lshr(block_count, ir.Constant(I64, 1))) as i:
            number = code.times(i, 2)
            _prefetch(code, row, 2 * block_bytes, code.times(i, 2 * block_bytes))
            add_block(number, evens)
            add_block(builder.add(number, ir.Constant(I64, 1)), odds)
        with builder.if_then(builder.trunc(block_count, I1)):
            add_block(builder.sub(block_count, ir.Constant(I64, 1)), evens)
        totals = [builder.fadd(builder.load(even), builder.load(odd)) for even, odd in zip(evens, odds, strict=True)]
        return [code.sum_lanes(total) for total in totals]

    return RowDot(BLOCK, block_bytes, "Q8_0", emit)


def _q8_0(code: VectorBuilder, block: Value) -> tuple[Value, Value]:
    return _half(code, block, 0), code.load(block, _QUANTS, 2)


def _q4_0(code: VectorBuilder, block: Value) -> tuple[Value, Value]:
    return _half(code, block, 0), code.builder.sub(_nibbles(code, block, 2), code.constant(_QUANTS, 8))


def _q5_0(code: VectorBuilder, block: Value) -> tuple[Value, Value]:
    fifth_bits = code.builder.bitcast(code.load(block, I32, 2), vector(I1, BLOCK))
    missing = code.builder.select(fifth_bits, code.constant(_QUANTS, 0), code.constant(_QUANTS, 16))
    return _half(code, block, 0), code.builder.sub(_nibbles(code, block, 6), missing)


def _mxfp4(code: VectorBuilder, block: Value) -> tuple[Value, Value]:
    scale = code.load_entry(_MXFP4_SCALES, code.load(block, I8))
    return code.splat(scale, LANES), code.look_up(_MXFP4_VALUES, _nibbles(code, block, 1))


_MXFP4_SCALES = tuple(2.0 ** (exponent - 128) for exponent in range(256))
"""Half of what the exponent byte stands for, because the values are doubled to be whole."""
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


# Superblocks of 256 with a scale for each 16 or 32 quants, and activations in Q8_K. What belongs to sixteens of quants
# is ordered as the sums of a record are: the even sixteens, then the odd ones.


@frozen
class _Superblock:
    """A superblock: scale * sum(group scale * dot(quants - offset)) - min_scale * sum(min * sum of activations).

    `quants` are 32 at a time, `group_scales` and `mins` 16 of 16 bits. `scale` is in all lanes, or if there are mins
    in lane 0 with their scale in lane 1. The sums of sixteen activations go with the mins and with the offset.
    """

    scale: Value
    group_scales: Value
    quants: Iterator[Value]
    signed: bool = False
    offset: int = 0
    mins: Value | None = None


def _superblocks(block_bytes: int, unpack: Callable[[VectorBuilder, Value], _Superblock]) -> RowDot:
    def emit(code: VectorBuilder, row: Value, columns: Value, activations: Sequence[Value]) -> list[Value]:
        builder = code.builder
        accumulators = [_accumulator(code, LANES) for _ in activations]
        scales_offset = builder.add(columns, builder.lshr(columns, ir.Constant(I64, 3)))
        with code.loop(builder.lshr(columns, ir.Constant(I64, 8))) as i:
            offset = code.times(i, block_bytes)
            _prefetch(code, row, block_bytes, offset)
            block = unpack(code, code.at(row, offset))
            totals = [code.no_dots() for _ in activations]
            group_scales = code.scales_to_spread(block.group_scales)
            for pair, weights in enumerate(zip(block.quants, block.quants, strict=True)):
                scales = code.spread_scales(group_scales, pair, block.signed)
                for token, record in enumerate(activations):
                    place = code.at(record, builder.add(code.times(i, _SUPERBLOCK), ir.Constant(I64, 2 * BLOCK * pair)))
                    quants = code.load(place, _QUANTS), code.load(place, _QUANTS, BLOCK)
                    totals[token] = code.add_scaled_dots(totals[token], weights, quants, scales, block.signed)
            for record, pair_totals, accumulator in zip(activations, totals, accumulators, strict=True):
                total = code.sum_of_dots(pair_totals, block.signed)
                sums = code.load(record, _SIXTEEN, builder.add(columns, code.times(i, 32)))
                scale = code.splat(code.load(record, F32, builder.add(scales_offset, code.times(i, 4))), LANES)
                if block.offset:
                    excess = code.dot_pairs(block.group_scales, sums)
                    total = builder.sub(total, builder.mul(excess, code.constant(_INTS, block.offset)))
                scale = builder.fmul(block.scale, scale)
                if block.mins is None:
                    _add_product(code, accumulator, scale, builder.sitofp(total, _FLOATS))
                    continue
                scale, min_scale = (code.shuffle(scale, [lane] * LANES) for lane in range(2))
                below = builder.sitofp(code.dot_pairs(block.mins, sums), _FLOATS)
                _add_product(code, accumulator, scale, builder.sitofp(total, _FLOATS))
                _add_product(code, accumulator, builder.fneg(min_scale), below)
        return [code.sum_lanes(builder.load(accumulator)) for accumulator in accumulators]

    return RowDot(_SUPERBLOCK, block_bytes, "Q8_K", emit)


def _q2_k(code: VectorBuilder, block: Value) -> _Superblock:
    packed_scales = code.shuffle(code.load(block, vector(I8, 16), 0), _EVEN_THEN_ODD)
    scales, mins = (code.builder.zext(half, _SIXTEEN) for half in _low_and_high(code, packed_scales))

    def quants() -> Iterator[Value]:
        for half in range(2):
            packed = code.load(block, _QUANTS, 16 + 32 * half)
            for part in range(4):
                yield code.move_bits(packed, 3 << 2 * part, -2 * part)

    return _Superblock(_two_halves(code, block, 80), scales, quants(), mins=mins)


def _q3_k(code: VectorBuilder, block: Value) -> _Superblock:
    builder, words = code.builder, vector(I32, 4)
    # Scale i has its lower 4 bits in nibble i/8 of byte i%8, its upper 2 in bits 2(i/4) of byte 8 + i%4.
    low = code.shuffle(code.load(block, vector(I32, 2), 96), [0, 1, 0, 1])
    low = builder.and_(builder.lshr(low, code.constant(words, [0, 0, 4, 4])), code.constant(words, 0x0F0F0F0F))
    high = builder.lshr(code.splat(code.load(block, I32, 104), 4), code.constant(words, [0, 2, 4, 6]))
    high = builder.shl(builder.and_(high, code.constant(words, 0x03030303)), code.constant(words, 4))
    scales = code.shuffle(builder.bitcast(builder.or_(low, high), vector(I8, 16)), _EVEN_THEN_ODD)
    scales = builder.sext(builder.sub(scales, code.constant(scales.type, 32)), _SIXTEEN)

    def quants() -> Iterator[Value]:
        third_bits = code.load(block, _QUANTS, 0)
        for half in range(2):
            packed = code.load(block, _QUANTS, 32 + 32 * half)
            for part in range(4):
                low, bit = code.move_bits(packed, 3 << 2 * part, -2 * part), 4 * half + part
                yield builder.or_(low, code.move_bits(third_bits, 1 << bit, 2 - bit))

    return _Superblock(_half(code, block, 108), scales, quants(), offset=4)


def _q4_k(code: VectorBuilder, block: Value) -> _Superblock:
    def quants() -> Iterator[Value]:
        for quarter in range(4):
            yield from _low_and_high(code, code.load(block, _QUANTS, 16 + 32 * quarter))

    return _with_six_bit_scales(code, block, quants())


def _q5_k(code: VectorBuilder, block: Value) -> _Superblock:
    def quants() -> Iterator[Value]:
        fifth_bits = code.load(block, _QUANTS, 16)
        for quarter in range(4):
            packed = code.load(block, _QUANTS, 48 + 32 * quarter)
            for half, four_bits in enumerate(_low_and_high(code, packed)):
                bit = 2 * quarter + half
                yield code.builder.or_(four_bits, code.move_bits(fifth_bits, 1 << bit, 4 - bit))

    return _with_six_bit_scales(code, block, quants())


def _with_six_bit_scales(code: VectorBuilder, block: Value, quants: Iterator[Value]) -> _Superblock:
    """Q4_K and Q5_K begin with two half floats, then 8 scales and 8 mins of 6 bits in 12 bytes."""
    builder, words = code.builder, vector(I32, 4)
    # Word 1 has four scales, word 2 four mins, and both have top bits of four more, whose nibbles are in word 3.
    header = code.load(block, words)
    first = builder.lshr(code.shuffle(header, [1, 1, 2, 2]), code.constant(words, [0, 2, 0, 2]))
    first = builder.and_(first, code.constant(words, [0x3F3F3F3F, 0x30303030] * 2))
    third = builder.lshr(code.shuffle(header, [3, 3, 3, 3]), code.constant(words, [0, 0, 0, 4]))
    third = builder.and_(third, code.constant(words, [0, 0x0F0F0F0F] * 2))
    scales_and_mins = builder.bitcast(builder.or_(first, third), vector(I8, 16))

    def eight_twice(first: int) -> Value:
        return builder.zext(code.shuffle(scales_and_mins, [*range(first, first + 8)] * 2), _SIXTEEN)

    return _Superblock(_two_halves(code, block, 0), eight_twice(0), quants, mins=eight_twice(8))


def _q6_k(code: VectorBuilder, block: Value) -> _Superblock:
    scales = code.shuffle(code.load(block, vector(I8, 16), 192), _EVEN_THEN_ODD)

    def quants() -> Iterator[Value]:
        for half in range(2):
            first = _low_and_high(code, code.load(block, _QUANTS, 64 * half))
            second = _low_and_high(code, code.load(block, _QUANTS, 64 * half + 32))
            top_bits = code.load(block, _QUANTS, 128 + 32 * half)
            for part, four_bits in enumerate((first[0], second[0], first[1], second[1])):
                yield code.builder.or_(four_bits, code.move_bits(top_bits, 3 << 2 * part, 4 - 2 * part))

    return _Superblock(_half(code, block, 208), code.builder.sext(scales, _SIXTEEN), quants(), offset=32)


def _iq4_xs(code: VectorBuilder, block: Value) -> _Superblock:
    builder, shorts = code.builder, vector(I16, 8)
    # Scale i has its upper 2 bits in bits 2i of 16, its lower 4 in nibble i of the 32 after them.
    high = builder.lshr(code.splat(code.load(block, I16, 2), 8), code.constant(shorts, range(0, 16, 2)))
    high = builder.shl(builder.and_(high, code.constant(shorts, 3)), code.constant(shorts, 4))
    low = code.shuffle(code.load(block, vector(I16, 2), 4), [0, 0, 0, 0, 1, 1, 1, 1])
    low = builder.and_(builder.lshr(low, code.constant(shorts, [0, 4, 8, 12] * 2)), code.constant(shorts, 15))
    scales = builder.sub(builder.or_(low, high), code.constant(shorts, 32))

    def quants() -> Iterator[Value]:
        for number in range(8):
            yield code.look_up(_IQ4_VALUES, _nibbles(code, block, 8 + 16 * number))

    return _Superblock(_half(code, block, 0), code.shuffle(scales, [*range(8), *range(8)]), quants(), signed=True)


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


# What several types share.


def _prefetch(code: VectorBuilder, row: Value, nbytes: int, offset: Value) -> None:
    """Ask for the bytes that come some way after the `nbytes` at `offset` from a row, be they the next row's.

    The CPU's own prefetching alone leaves a third of the memory's bandwidth unused.
    """
    for line in range(_PREFETCH_BYTES, _PREFETCH_BYTES + nbytes, _LINE_BYTES):
        code.prefetch(code.at(row, line), offset)


def _accumulator(code: VectorBuilder, count: int) -> Value:
    return code.variable(code.constant(vector(F32, count), 0.0))


def _add_product(code: VectorBuilder, accumulator: Value, left: Value, right: Value) -> None:
    code.builder.store(code.multiply_add(left, right, code.builder.load(accumulator)), accumulator)


def _half(code: VectorBuilder, block: Value, offset: int) -> Value:
    """A half float in all lanes."""
    return code.half_to_float(code.splat(code.load(block, I16, offset), LANES))


def _two_halves(code: VectorBuilder, block: Value, offset: int) -> Value:
    """Two half floats in turns."""
    pair = code.splat(code.load(block, I32, offset), LANES // 2)
    return code.half_to_float(code.builder.bitcast(pair, vector(I16, LANES)))


def _nibbles(code: VectorBuilder, block: Value, offset: int) -> Value:
    """The lower nibbles of 16 bytes, then the upper ones."""
    packed = code.shuffle(code.load(block, vector(I32, 4), offset), [*range(4), *range(4)])
    shifted = code.builder.lshr(packed, code.constant(_INTS, [0] * 4 + [4] * 4))
    return code.builder.and_(code.builder.bitcast(shifted, _QUANTS), code.constant(_QUANTS, 15))


def _low_and_high(code: VectorBuilder, packed: Value) -> tuple[Value, Value]:
    low = code.builder.and_(packed, code.constant(packed.type, 15))
    return low, code.builder.lshr(packed, code.constant(packed.type, 4))


ROW_DOTS: dict[str, RowDot] = {
    "F32": _floats(4, "F32", _from_f32),
    "F16": _floats(2, "F16", _from_f16),
    "BF16": _floats(2, "BF16", _from_bf16),
    "Q8_0": _blocks(34, _q8_0),
    "Q4_0": _blocks(18, _q4_0),
    "Q5_0": _blocks(22, _q5_0),
    "MXFP4": _blocks(17, _mxfp4),
    "Q2_K": _superblocks(84, _q2_k),
    "Q3_K": _superblocks(110, _q3_k),
    "Q4_K": _superblocks(144, _q4_k),
    "Q5_K": _superblocks(176, _q5_k),
    "Q6_K": _superblocks(210, _q6_k),
    "IQ4_XS": _superblocks(136, _iq4_xs),
}
"""Every weight type that has a kernel, by its ggml name."""
