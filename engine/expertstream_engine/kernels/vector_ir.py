"""A vocabulary of LLVM vector operations for the weight kernels, and what of it CPUs do differently.

It owns the mapping to instructions: integer dot products, table look-up, half precision. It knows no weight format.
Each flavour gives the same integers, and the order of float operations never depends on the flavour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding
import numba.core.cgutils
from attrs import frozen
from llvmlite import ir
from numba.core.registry import cpu_target

Value = Any
"""An llvmlite value; llvmlite is untyped."""
Pair = tuple[Value, Value]
_cgutils: Any = numba.core.cgutils  # numba is untyped

LANES = 8
"""Lanes of 32 bits that every accumulator has: 256 bits are the widest that all CPUs of interest do at full speed."""
BLOCK = 32
"""Bytes of quants that one dot product takes: LANES groups of four neighbours."""

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F16 = ir.FloatType(), ir.HalfType()

_LARGEST_FLOAT = 3.4028234663852886e38


def vector(element: Value, count: int) -> Value:
    """The type of `count` elements side by side."""
    return ir.VectorType(element, count)


@frozen
class Target:
    """The CPU that numba compiles for: its LLVM triple, name and features."""

    triple: str
    cpu: str
    features: frozenset[str]

    @classmethod
    def of_numba(cls) -> Target:
        """What numba compiles for in this process: the host, unless NUMBA_CPU_NAME says otherwise."""
        triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
        return cls(triple, cpu, frozenset(name[1:] for name in features.split(",") if name.startswith("+")))

    @property
    def is_arm64(self) -> bool:
        """True for 64-bit ARM, whose baseline has vectors, fused multiply-add and half precision."""
        return self.triple.startswith(("aarch64", "arm64"))

    @property
    def has_fma(self) -> bool:
        """True if a fused multiply-add is an instruction and not a library call."""
        return self.is_arm64 or "fma" in self.features

    @property
    def has_half(self) -> bool:
        """True if conversions from and to half precision are instructions and not library calls."""
        return self.is_arm64 or "f16c" in self.features


class VectorBuilder:
    """Emits vector code at an llvmlite builder's position. This flavour runs on every CPU.

    Quants are bytes, 32 at a time, those called unsigned below 65; activations are bytes of -127 to 127.
    """

    flavour = "generic"

    def __init__(self, builder: Value, target: Target) -> None:
        self.builder = builder
        self._target = target

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        """True if the target has every instruction that this flavour emits."""
        return True

    # Integer dot products: lane i of a result sums elements 4i to 4i+3.

    def dot(self, quants: Value, activations: Value) -> Value:
        """The dot products of signed quants with activations."""
        wide = vector(I16, BLOCK)
        pairs = self.dot_pairs(self.builder.sext(quants, wide), self.builder.sext(activations, wide))
        return self._add_neighbours(pairs)

    def no_dots(self) -> Pair:
        """What `add_scaled_dots` begins with."""
        zero = self.constant(vector(I32, LANES), 0)
        return zero, zero

    def add_scaled_dots(
        self, totals: Pair, quants: Pair, activations: Pair, scales: Sequence[Value], signed: bool
    ) -> Pair:
        """The totals and scale * dot for each of a pair of quants; `sum_of_dots` makes one sum of them.

        `scales` are from `spread_scales`; `signed` is of the quants, here and there.
        """
        first, second = (
            self.builder.add(total, self.builder.mul(self.dot(weights, numbers), scale))
            for total, weights, numbers, scale in zip(totals, quants, activations, scales, strict=True)
        )
        return first, second

    def sum_of_dots(self, totals: Pair, signed: bool) -> Value:
        """What was added up, in 32-bit lanes.

        Each half of the vector has two sums of neighbouring lanes of the first `dot` of a pair, then two of the second.
        """
        lanes = [lane for half in (0, LANES // 2) for start in (half, half + LANES) for lane in (start, start + 2)]
        odd = [lane + 1 for lane in lanes]
        return self.builder.add(self.shuffle(totals[0], lanes, totals[1]), self.shuffle(totals[0], odd, totals[1]))

    def scales_to_spread(self, scales: Value) -> Value:
        """16 scales of 16 bits in the form that `spread_scales` wants."""
        return scales

    def spread_scales(self, scales: Value, pair: int, signed: bool) -> Sequence[Value]:
        """What `add_scaled_dots` wants for quants 2 * pair and 2 * pair + 1.

        The lower lanes of quants n are scaled by scale n, the upper ones by scale 8 + n.
        """
        orders = [[number] * 4 + [8 + number] * 4 for number in (2 * pair, 2 * pair + 1)]
        return [self.builder.sext(self.shuffle(scales, order), vector(I32, LANES)) for order in orders]

    def dot_pairs(self, left: Value, right: Value) -> Value:
        """Sums of the products of neighbours: 32-bit lanes from twice as many signed 16-bit ones."""
        wide = vector(I32, left.type.count)
        left, right = self.builder.sext(left, wide), self.builder.sext(right, wide)
        return self._add_neighbours(self.builder.mul(left, right))

    def look_up(self, table: Sequence[int], indices: Value) -> Value:
        """table[index] for each byte of `indices`; 16 entries, written as bytes."""
        entries = [self.constant(indices.type, entry) for entry in table]
        for bit in range(4):
            chosen = self.builder.icmp_unsigned(
                "!=", self.builder.and_(indices, self.constant(indices.type, 1 << bit)), self.constant(indices.type, 0)
            )
            pairs = zip(entries[0::2], entries[1::2], strict=True)
            entries = [self.builder.select(chosen, odd, even) for even, odd in pairs]
        return entries[0]

    def _add_neighbours(self, lanes: Value) -> Value:
        count = lanes.type.count
        even = self.shuffle(lanes, range(0, count, 2))
        return self.builder.add(even, self.shuffle(lanes, range(1, count, 2)))

    # Floats. No fast-math anywhere: a token's result must not depend on the code around it.

    def multiply_add(self, left: Value, right: Value, addend: Value) -> Value:
        """left * right + addend, rounded once where the target can do so."""
        if self._target.has_fma:
            return self.call("llvm.fma", left.type, left, right, addend)
        return self.builder.fadd(self.builder.fmul(left, right), addend)

    def sum_lanes(self, lanes: Value) -> Value:
        """The sum of all lanes, a scalar, added in halves."""
        count = lanes.type.count
        while count > 1:
            count //= 2
            low = self.shuffle(lanes, range(count))
            lanes = self.builder.fadd(low, self.shuffle(lanes, range(count, 2 * count)))
        return self.pick(lanes)

    def largest_magnitude(self, lanes: Value) -> Value:
        """The largest lane of magnitudes, a scalar; a NaN counts as larger than any number."""
        count = lanes.type.count
        while count > 1:
            count //= 2
            lanes = self.larger_magnitude(
                self.shuffle(lanes, range(count)), self.shuffle(lanes, range(count, 2 * count))
            )
        return self.pick(lanes)

    def larger_magnitude(self, left: Value, right: Value) -> Value:
        """The larger lanes of two vectors of magnitudes; a NaN counts as larger than any number."""
        b, words = self.builder, vector(I32, left.type.count)  # floats without a sign have the order of their bits
        return b.select(b.icmp_signed(">", b.bitcast(right, words), b.bitcast(left, words)), right, left)

    def magnitude(self, lanes: Value) -> Value:
        """The lanes without their signs."""
        return self.call("llvm.fabs", lanes.type, lanes)

    def limit_to_finite(self, x: Value) -> Value:
        """x, or the largest finite float of its sign where x is infinite."""
        for limit, beyond in ((_LARGEST_FLOAT, ">"), (-_LARGEST_FLOAT, "<")):
            bound = ir.Constant(F32, limit)
            x = self.builder.select(self.builder.fcmp_ordered(beyond, x, bound), bound, x)
        return x

    def half_to_float(self, bits: Value) -> Value:
        """The floats that a vector of 16-bit patterns stands for, IEEE half precision; exact."""
        count, b = bits.type.count, self.builder
        floats, words = vector(F32, count), vector(I32, count)
        if self._target.has_half:
            return b.fpext(b.bitcast(bits, vector(F16, count)), floats)
        wide = b.zext(bits, words)
        sign = b.shl(b.and_(wide, self.constant(words, 0x8000)), self.constant(words, 16))
        magnitude = b.shl(b.and_(wide, self.constant(words, 0x7FFF)), self.constant(words, 13))
        # The exponent is rebiased by a multiplication, which also makes subnormals normal.
        finite = b.bitcast(b.fmul(b.bitcast(magnitude, floats), self.constant(floats, 2.0**112)), words)
        endless = b.icmp_unsigned(">=", magnitude, self.constant(words, 0x7C00 << 13))
        magnitude = b.select(endless, b.or_(magnitude, self.constant(words, 0x7F800000)), finite)
        return b.bitcast(b.or_(magnitude, sign), floats)

    def float_to_half(self, x: Value) -> Value:
        """The 16-bit patterns of the nearest IEEE half precision numbers, ties to even."""
        count, b = x.type.count, self.builder
        floats, words, halves = vector(F32, count), vector(I32, count), vector(I16, count)
        if self._target.has_half:
            return b.bitcast(b.fptrunc(x, vector(F16, count)), halves)
        bits = b.bitcast(x, words)
        sign = b.and_(b.lshr(bits, self.constant(words, 16)), self.constant(words, 0x8000))
        magnitude = b.and_(bits, self.constant(words, 0x7FFFFFFF))
        odd = b.and_(b.lshr(magnitude, self.constant(words, 13)), self.constant(words, 1))
        rounded = b.lshr(b.add(magnitude, b.add(odd, self.constant(words, 0xFFF))), self.constant(words, 13))
        normal = b.sub(rounded, self.constant(words, 112 << 10))
        overflow = b.icmp_unsigned(">", normal, self.constant(words, 0x7C00))
        normal = b.select(overflow, self.constant(words, 0x7C00), normal)
        # One half has the spacing of subnormal halves as its own, so adding it rounds them.
        half = self.constant(floats, 0.5)
        shifted = b.bitcast(b.fadd(b.bitcast(magnitude, floats), half), words)
        subnormal = b.sub(shifted, b.bitcast(half, words))
        is_small = b.icmp_unsigned("<", magnitude, self.constant(words, 0x38800000))
        is_nan = b.icmp_unsigned(">", magnitude, self.constant(words, 0x7F800000))
        result = b.select(is_small, subnormal, normal)
        result = b.select(is_nan, self.constant(words, 0x7E00), result)
        return b.trunc(b.or_(result, sign), halves)

    def brain_to_float(self, bits: Value) -> Value:
        """The floats whose upper 16 bits are `bits`; exact."""
        words = vector(I32, bits.type.count)
        wide = self.builder.shl(self.builder.zext(bits, words), self.constant(words, 16))
        return self.builder.bitcast(wide, vector(F32, bits.type.count))

    def float_to_brain(self, x: Value) -> Value:
        """The upper 16 bits of x, rounded to nearest, ties to even; a NaN stays one."""
        b, words = self.builder, vector(I32, x.type.count)
        bits = b.bitcast(x, words)
        odd = b.and_(b.lshr(bits, self.constant(words, 16)), self.constant(words, 1))
        rounded = b.add(bits, b.add(odd, self.constant(words, 0x7FFF)))
        quiet = b.or_(bits, self.constant(words, 0x400000))
        rounded = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
        return b.trunc(b.lshr(rounded, self.constant(words, 16)), vector(I16, x.type.count))

    # Memory, loops, constants, lanes.

    def variable(self, initial: Value) -> Value:
        """A pointer to a local variable, which begins as `initial` whenever control comes here."""
        return _cgutils.alloca_once_value(self.builder, initial)

    @contextmanager
    def loop(self, count: Value | int) -> Iterator[Value]:
        """Emit what is in the `with` block as the body of a loop; gives the index, from 0, in 64 bits."""
        count = ir.Constant(I64, count) if isinstance(count, int) else count
        with _cgutils.for_range(self.builder, count, intp=I64) as loop:
            yield loop.index

    def load(self, pointer: Value, type_: Value, offset: Value | int = 0) -> Value:
        """The value at `offset` bytes from a byte pointer, which may be misaligned to anything."""
        value = self.builder.load(self.builder.bitcast(self.at(pointer, offset), type_.as_pointer()))
        value.align = 1
        return value

    def store(self, value: Value, pointer: Value, offset: Value | int = 0) -> None:
        """Write the value at `offset` bytes from a byte pointer, which may be misaligned to anything."""
        place = self.builder.bitcast(self.at(pointer, offset), value.type.as_pointer())
        self.builder.store(value, place).align = 1

    def prefetch(self, pointer: Value, offset: Value | int) -> None:
        """Begin to bring the cache line at `offset` bytes from a byte pointer near; nothing has to be there."""
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", (pointer.type,), kind)
        # To read; into the second level, which takes more lines at a time than the first; data.
        hints = [ir.Constant(I32, hint) for hint in (0, 2, 1)]
        self.builder.call(function, [self.at(pointer, offset), *hints])

    def load_entry(self, table: Sequence[float], index: Value) -> Value:
        """table[index], a float32 from a constant in memory; `index` is an unsigned integer."""
        entries = ir.Constant(ir.ArrayType(F32, len(table)), list(table))
        place = _cgutils.global_constant(self.builder, "table", entries)
        pointer = self.builder.bitcast(place, I8.as_pointer())
        return self.load(pointer, F32, self.times(self.builder.zext(index, I64), 4))

    def at(self, pointer: Value, offset: Value | int) -> Value:
        """The byte pointer moved by `offset` bytes."""
        return self.builder.gep(pointer, [ir.Constant(I64, offset) if isinstance(offset, int) else offset])

    def times(self, value: Value, factor: int) -> Value:
        """A 64-bit integer times a constant."""
        return self.builder.mul(value, ir.Constant(I64, factor))

    def constant(self, type_: Value, value: float | Sequence[int]) -> Value:
        """A vector of one value in all lanes, or of the values given."""
        values = list(value) if isinstance(value, Sequence) else [value] * type_.count
        return ir.Constant(type_, values)

    def splat(self, scalar: Value, count: int) -> Value:
        """The scalar in all lanes."""
        return self.shuffle(self.builder.bitcast(scalar, vector(scalar.type, 1)), [0] * count)

    def shuffle(self, lanes: Value, order: Sequence[int], more: Value = None) -> Value:
        """Lanes of a vector in a new order; those of `more` have the numbers after its last one."""
        more = lanes if more is None else more
        return self.builder.shuffle_vector(lanes, more, ir.Constant(vector(I32, len(order)), list(order)))

    def pick(self, lanes: Value) -> Value:
        """The first lane as a scalar."""
        return self.builder.extract_element(lanes, ir.Constant(I32, 0))

    def move_bits(self, lanes: Value, mask: int, left: int) -> Value:
        """The masked bits of each byte, moved left, or right if `left` is negative; they stay within their byte."""
        masked = self.builder.and_(lanes, self.constant(lanes.type, mask))
        # No CPU shifts bytes; bits that stay within their byte can be shifted in pairs of bytes.
        pairs = vector(I16, lanes.type.count // 2)
        shift = self.builder.shl if left > 0 else self.builder.lshr
        return self.builder.bitcast(
            shift(self.builder.bitcast(masked, pairs), self.constant(pairs, abs(left))), lanes.type
        )

    def call(self, name: str, result: Value, *arguments: Value) -> Value:
        """A call of an LLVM intrinsic; the name of an overloaded one gets its suffix here."""
        if not name.startswith("llvm.x86."):
            operand = arguments[0].type
            name = f"{name}.v{operand.count}{'f32' if operand.element == F32 else operand.element}"
        function = self.builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [argument.type for argument in arguments])
            function = ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)


class Avx2Builder(VectorBuilder):
    """Integer dot products by vpmaddubsw and vpmaddwd; for the quants allowed nothing saturates."""

    flavour = "avx2"

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        """True for x86 with AVX2."""
        return "avx2" in target.features

    def dot(self, quants: Value, activations: Value) -> Value:
        pairs = self._dot_pairs_of_bytes(*self._move_signs(quants, activations))
        return self.dot_pairs(pairs, self.constant(pairs.type, 1))

    def add_scaled_dots(
        self, totals: Pair, quants: Pair, activations: Pair, scales: Sequence[Value], signed: bool
    ) -> Pair:
        if signed:
            moved = [self._move_signs(*each) for each in zip(quants, activations, strict=True)]
            quants, activations = zip(*moved, strict=True)
        first, second = (
            self._add_dot_pairs(total, self._dot_pairs_of_bytes(weights, numbers), scale)
            for total, weights, numbers, scale in zip(totals, quants, activations, scales, strict=True)
        )
        return first, second

    def scales_to_spread(self, scales: Value) -> Value:
        # LLVM must not see how the scales were made: it would make every spread anew from there, in three
        # instructions rather than one (up to 20 % of a kernel's speed). An empty assembly text is a wall.
        through = ir.FunctionType(scales.type, [scales.type])
        return self.builder.asm(through, "", "=x,0", [scales], False)

    def spread_scales(self, scales: Value, pair: int, signed: bool) -> Sequence[Value]:
        # A lane has its scale twice, for the two pairs of products whose scaled sum it gets.
        return [self.shuffle(scales, [each] * 8 + [8 + each] * 8) for each in (2 * pair, 2 * pair + 1)]

    def dot_pairs(self, left: Value, right: Value) -> Value:
        return self.call("llvm.x86.avx2.pmadd.wd", vector(I32, LANES), left, right)

    def look_up(self, table: Sequence[int], indices: Value) -> Value:
        entries = self.constant(indices.type, [*table, *table])
        return self.call("llvm.x86.avx2.pshuf.b", indices.type, entries, indices)

    def _move_signs(self, quants: Value, activations: Value) -> tuple[Value, Value]:
        """Unsigned quants and signed activations with the same products, which is what the instructions want."""
        sign = "llvm.x86.avx2.psign.b"
        return self.call(sign, quants.type, quants, quants), self.call(sign, quants.type, activations, quants)

    def _dot_pairs_of_bytes(self, quants: Value, activations: Value) -> Value:
        return self.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), quants, activations)

    def _add_dot_pairs(self, total: Value, left: Value, right: Value) -> Value:
        return self.builder.add(total, self.dot_pairs(left, right))


class VnniBuilder(Avx2Builder):
    """Integer dot products by vpdpbusd and vpdpwssd.

    Four products of unsigned quants add up to 16 bits, so a pair's dot products are packed and scaled together: CPUs
    have two units that multiply, and they are what limits the speed.
    """

    flavour = "vnni"

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        """True for x86 with AVX512-VNNI for 256-bit vectors, or AVX-VNNI."""
        return target.features >= {"avx512vnni", "avx512vl"} or "avxvnni" in target.features

    def dot(self, quants: Value, activations: Value) -> Value:
        zero = self.constant(vector(I32, LANES), 0)
        return self._accumulate("vpdpbusd", zero, *self._move_signs(quants, activations))

    def add_scaled_dots(
        self, totals: Pair, quants: Pair, activations: Pair, scales: Sequence[Value], signed: bool
    ) -> Pair:
        if signed:
            return super().add_scaled_dots(totals, quants, activations, scales, signed)
        zero = self.constant(vector(I32, LANES), 0)
        dots = [self._accumulate("vpdpbusd", zero, *each) for each in zip(quants, activations, strict=True)]
        packed = self.call("llvm.x86.avx2.packssdw", vector(I16, 16), *dots)
        # In turns, because one total would wait for its own last addition.
        return totals[1], self._add_dot_pairs(totals[0], packed, *scales)

    def sum_of_dots(self, totals: Pair, signed: bool) -> Value:
        return super().sum_of_dots(totals, signed) if signed else self.builder.add(*totals)

    def spread_scales(self, scales: Value, pair: int, signed: bool) -> Sequence[Value]:
        if signed:
            return super().spread_scales(scales, pair, signed)
        # Packing takes the lower lanes of both, then the upper lanes of both.
        order = [first + number for first in (0, 8) for number in (2 * pair, 2 * pair + 1) for _ in range(4)]
        return [self.shuffle(scales, order)]

    def _add_dot_pairs(self, total: Value, left: Value, right: Value) -> Value:
        return self._accumulate("vpdpwssd", total, left, right)

    def _accumulate(self, instruction: str, total: Value, left: Value, right: Value) -> Value:
        # Since LLVM 22 the operands are typed by their elements, before that as 32-bit lanes.
        if llvmlite.binding.llvm_version_info[0] < 22:
            left, right = self.builder.bitcast(left, total.type), self.builder.bitcast(right, total.type)
        return self.call(f"llvm.x86.avx512.{instruction}.256", total.type, total, left, right)


FLAVOURS: dict[str, type[VectorBuilder]] = {
    builder.flavour: builder for builder in (VnniBuilder, Avx2Builder, VectorBuilder)
}
"""Builders by flavour, the fastest first."""


def flavours_for(target: Target) -> tuple[str, ...]:
    """The flavours that the target can run, the fastest first; the last one, "generic", runs everywhere."""
    return tuple(name for name, builder in FLAVOURS.items() if builder.runs_on(target))
