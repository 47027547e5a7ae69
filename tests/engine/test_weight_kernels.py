"""Dot products and rounding against the package gguf and plain numpy, in every flavour that this CPU runs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from expertstream.errors import UnsupportedCheckpoint
from expertstream_engine.kernels.activations import ROUNDINGS
from expertstream_engine.kernels.registry import (
    SUPPORTED_TYPES,
    activation_kernel,
    check_columns,
    compile_kernel,
    weight_kernel,
)
from expertstream_engine.kernels.row_dots import ROW_DOTS
from expertstream_engine.kernels.vector_ir import FLAVOURS, Target, flavours_for

HOST_FLAVOURS = flavours_for(Target.of_numba())
BLOCK_FLOAT_TYPES = tuple(name for name in SUPPORTED_TYPES if ROW_DOTS[name].block_columns > 1)

# Where the half precision scales of a block lie, in bytes. Formats: ggml-common.h.
HALF_SCALES: dict[str, tuple[int, ...]] = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,)}
HALF_SCALES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}

_kernels: dict[tuple[str, str, str], tuple[object, Callable[..., None]]] = {}


def function(kind: str, name: str, flavour: str) -> Callable[..., None]:
    """The compiled function as a C caller sees it; ctypes releases the GIL."""
    if (kind, name, flavour) not in _kernels:
        compiled = compile_kernel(kind, name, flavour)
        argument_count = 10 if kind == "rows" else 6
        c_type = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * argument_count)
        _kernels[kind, name, flavour] = compiled, c_type(compiled.address)
    return _kernels[kind, name, flavour][1]


def random_weights(type_name: str, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Rows whose quants, and integer scales, are any bytes at all, with sane float scales; some negative, one zero."""
    rng = np.random.default_rng(seed)
    if type_name in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return gguf.quantize(values, GGMLQuantizationType[type_name]).view(np.uint8).reshape(rows, -1)
    block_columns, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    blocks = rng.integers(0, 256, (rows * columns // block_columns, block_bytes), dtype=np.uint8)
    for offset in HALF_SCALES.get(type_name, ()):
        scales = rng.standard_normal(len(blocks)).astype(np.float16) / np.float16(64)
        scales[0] = 0
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 130, len(blocks))
    return blocks.reshape(rows, -1)


def dequantized(type_name: str, weights: NDArray[np.uint8]) -> NDArray[np.float64]:
    if type_name in ("F32", "F16"):
        return weights.view({"F32": np.float32, "F16": np.float16}[type_name]).astype(np.float64)
    return gguf.dequantize(weights, GGMLQuantizationType[type_name]).astype(np.float64)


def q8_k_parts(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.int16], NDArray[np.float32]]:
    """Quants, sums of 16 (even ones first) and scales of each block of 256, by the definition of Q8_K."""
    blocks = x.reshape(-1, 256)
    first = np.argmax(np.abs(blocks), axis=1, keepdims=True)
    extreme = np.take_along_axis(blocks, first, axis=1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(extreme == 0, np.float32(0), np.float32(-127) / extreme)
    inverse = np.clip(inverse, *(np.finfo(np.float32).min, np.finfo(np.float32).max))
    quants = np.rint(blocks * inverse).astype(np.int8)
    with np.errstate(divide="ignore"):
        scales = np.where(extreme == 0, np.float32(0), np.float32(1) / inverse)
    sums = quants.reshape(-1, 16, 16).sum(axis=2, dtype=np.int16)
    return quants, np.concatenate([sums[:, 0::2], sums[:, 1::2]], axis=1), scales


def rounded(activation: str, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """What the activations are after rounding, by plain numpy and gguf."""
    if activation == "F32":
        return x.astype(np.float64)
    if activation == "Q8_K":
        quants, _, scales = q8_k_parts(x)
        return (quants * scales.astype(np.float64)).reshape(x.shape)
    kind = GGMLQuantizationType[activation]
    return np.asarray(gguf.dequantize(gguf.quantize(x, kind), kind), np.float64).reshape(x.shape)


def records_of(x: NDArray[np.float32], activation: str, flavour: str) -> NDArray[np.uint8]:
    tokens, columns = x.shape
    record_bytes = ROUNDINGS[activation].record_bytes(columns)
    records = np.full((tokens, record_bytes), 0xA5, np.uint8)
    function("round_rows", activation, flavour)(
        x.ctypes.data, x.strides[0] // 4, columns, tokens, records.ctypes.data, record_bytes
    )
    return records


def dot_rows(
    type_name: str,
    weights: NDArray[np.uint8],
    x: NDArray[np.float32],
    flavour: str,
    rows: slice = slice(None),
    shift_bytes: int = 0,
) -> NDArray[np.float32]:
    """out[t, r] of the rows asked for, NaN elsewhere; the weights lie `shift_bytes` past an aligned address."""
    tokens, columns = x.shape
    row_count, row_bytes = weights.shape
    room = np.zeros(weights.size + 128, np.uint8)
    begin = -room.ctypes.data % 64 + shift_bytes
    room[begin : begin + weights.size] = weights.reshape(-1)
    records = records_of(x, ROW_DOTS[type_name].activation, flavour)
    out = np.full((tokens, row_count + 3), np.nan, np.float32)
    first, last, _ = rows.indices(row_count)
    function("rows", type_name, flavour)(
        room.ctypes.data + begin, row_bytes, first, last, columns,
        records.ctypes.data, records.shape[1], tokens, out.ctypes.data, out.shape[1],
    )  # fmt: skip
    assert np.isnan(out[:, row_count:]).all()
    return out[:, :row_count]


def assert_is_product(
    type_name: str, weights: NDArray[np.uint8], x: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    matrix, vectors = dequantized(type_name, weights), rounded(ROW_DOTS[type_name].activation, x)
    expected, magnitude = vectors @ matrix.T, np.abs(vectors) @ np.abs(matrix).T
    assert (np.abs(out - expected) <= 1e-6 * magnitude + 1e-30).all()


def columns_to_try(type_name: str) -> tuple[int, ...]:
    block = ROW_DOTS[type_name].block_columns
    return {1: (1, 31, 32, 77, 300), 32: (32, 64, 96, 2880), 256: (256, 512, 768)}[block]


@pytest.mark.parametrize("flavour", HOST_FLAVOURS)
@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_a_product_is_that_of_the_dequantized_weights_with_the_rounded_activations(
    type_name: str, flavour: str
) -> None:
    for shift_bytes, columns in enumerate(columns_to_try(type_name)):
        weights = random_weights(type_name, 35, columns, seed=columns)
        x = np.random.default_rng(columns).standard_normal((7, columns), dtype=np.float32)
        assert_is_product(type_name, weights, x, dot_rows(type_name, weights, x, flavour, shift_bytes=shift_bytes))


@pytest.mark.parametrize("flavour", HOST_FLAVOURS)
@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_each_activation_meets_its_own_weight(type_name: str, flavour: str) -> None:
    columns = max(ROW_DOTS[type_name].block_columns, 64)
    weights = random_weights(type_name, 3, columns, seed=5)
    x = np.eye(columns, dtype=np.float32)
    expected = dequantized(type_name, weights) @ rounded(ROW_DOTS[type_name].activation, x)
    out = dot_rows(type_name, weights, x, flavour, shift_bytes=1)
    np.testing.assert_allclose(out.T, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("flavour", HOST_FLAVOURS)
@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_a_result_does_not_depend_on_the_other_rows_and_tokens_of_the_call(type_name: str, flavour: str) -> None:
    columns = columns_to_try(type_name)[2]
    weights = random_weights(type_name, 37, columns)
    x = np.random.default_rng(1).standard_normal((11, columns), dtype=np.float32)
    whole = dot_rows(type_name, weights, x, flavour)
    for token in range(11):
        alone = dot_rows(type_name, weights, x[token : token + 1], flavour, shift_bytes=token)
        np.testing.assert_array_equal(alone[0].view(np.uint32), whole[token].view(np.uint32))
    for first, last in ((0, 1), (5, 29), (36, 37), (9, 9)):
        part = dot_rows(type_name, weights, x, flavour, rows=slice(first, last))
        np.testing.assert_array_equal(part[:, first:last].view(np.uint32), whole[:, first:last].view(np.uint32))
        assert np.isnan(part[:, :first]).all()
        assert np.isnan(part[:, last:]).all()


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_all_flavours_give_the_same_bits(type_name: str) -> None:
    columns = columns_to_try(type_name)[1] * 3
    weights = random_weights(type_name, 9, columns, seed=3)
    x = np.random.default_rng(2).standard_normal((5, columns), dtype=np.float32)
    first, *others = (dot_rows(type_name, weights, x, flavour).view(np.uint32) for flavour in HOST_FLAVOURS)
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("flavour", HOST_FLAVOURS)
@pytest.mark.parametrize("type_name", BLOCK_FLOAT_TYPES)
def test_no_quants_and_no_activations_overflow(type_name: str, flavour: str) -> None:
    """Rows of one repeated byte, each of the 256, with the activations that make the largest sums."""
    columns = ROW_DOTS[type_name].block_columns * 3
    weights = random_weights(type_name, 256, columns)
    kept = [weights.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][1])[:, offset : offset + 2].copy()
            for offset in HALF_SCALES.get(type_name, ())]  # fmt: skip
    exponents = weights[:, :1].copy()
    weights[:] = np.arange(256, dtype=np.uint8)[:, None]
    blocks = weights.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][1])
    for offset, scales in zip(HALF_SCALES.get(type_name, ()), kept, strict=True):
        blocks[:, offset : offset + 2] = scales
    if type_name == "MXFP4":
        blocks[:, :1] = np.repeat(exponents, 3, axis=0)
    alternating = np.where(np.arange(columns) % 2, np.float32(-5), np.float32(5))
    constant, nothing = np.full(columns, 3, np.float32), next_to_nothing(columns)
    x = np.stack([constant, -constant, alternating, -alternating, nothing])
    assert_is_product(type_name, weights, x, dot_rows(type_name, weights, x, flavour))


def next_to_nothing(columns: int) -> NDArray[np.float32]:
    """Blocks of zeros, negative zeros among them, and one block of tiny numbers."""
    x = np.zeros(columns, np.float32)
    x[::3] = -0.0
    x[: columns // 3] = 1e-30
    return x


@pytest.mark.parametrize("flavour", HOST_FLAVOURS)
def test_the_smallest_and_largest_scales_keep_their_value(flavour: str) -> None:
    halves = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00], np.uint16)
    weights = random_weights("Q8_0", len(halves), 32)
    weights[:, :2] = halves.view(np.uint8).reshape(-1, 2)
    x = np.random.default_rng(4).standard_normal((2, 32), dtype=np.float32)
    assert_is_product("Q8_0", weights, x, dot_rows("Q8_0", weights, x, flavour))
    exponents = np.arange(0, 250, dtype=np.uint8)
    weights = random_weights("MXFP4", len(exponents), 32)
    weights[:, 0] = exponents
    out = dot_rows("MXFP4", weights, np.ones((1, 32), np.float32), flavour)
    expected = dequantized("MXFP4", weights) @ rounded("Q8_0", np.ones((1, 32), np.float32))[0]
    np.testing.assert_allclose(out[0], expected, rtol=1e-6, atol=1e-44)


def products_with_one(flavour: str, type_name: str, patterns: NDArray[np.uint16]) -> NDArray[np.float32]:
    weights = patterns.view(np.uint8).reshape(-1, 2)
    return dot_rows(type_name, weights, np.ones((1, 1), np.float32), flavour)[0]


@pytest.mark.parametrize("flavour", HOST_FLAVOURS)
def test_every_half_and_brain_float_keeps_its_value(flavour: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    halves = patterns.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(products_with_one(flavour, "F16", patterns), halves)
    floats = (patterns.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(products_with_one(flavour, "BF16", patterns), floats)


def telling_floats() -> NDArray[np.float32]:
    """Numbers at and beside every tie, limit and kind of half and brain floats, a multiple of 256 of them."""
    halves = np.arange(0, 0x7C00, 7, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = halves[:-1] + (halves[1:] - halves[:-1]) / 2
    ties = np.concatenate([halves, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9e9))])
    limits = np.array([0, 1e-45, 2**-26, 2**-25, 2**-24, 2**-14, 65504, 65519, 65520, 3.4e38, np.inf], np.float32)
    bits = np.random.default_rng(9).integers(0, 0x7F800000, 4096, dtype=np.uint32).view(np.float32)
    x = np.concatenate([ties, limits, bits])
    x = np.concatenate([x, -x])
    return np.resize(x, -(-len(x) // 256) * 256)


@pytest.mark.parametrize("flavour", HOST_FLAVOURS)
def test_rounding_to_half_and_brain_floats_is_to_nearest_even(flavour: str) -> None:
    x = telling_floats()[None, :-3]
    with np.errstate(over="ignore"):
        halves = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(floats_of(x, "F16", flavour), halves)
    brains = gguf.quantize(x, GGMLQuantizationType.BF16).view(np.uint16).astype(np.uint32) << 16
    np.testing.assert_array_equal(floats_of(x, "BF16", flavour).view(np.uint32), brains)
    np.testing.assert_array_equal(floats_of(x, "F32", flavour).view(np.uint32), x.view(np.uint32))


@pytest.mark.parametrize("flavour", HOST_FLAVOURS)
@pytest.mark.parametrize("activation", ["F32", "F16", "BF16"])
def test_rounding_keeps_a_nan(activation: str, flavour: str) -> None:
    x = np.array([[0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0xFF800001] * 3], np.uint32).view(np.float32)
    assert np.isnan(floats_of(x, activation, flavour)).all()


@pytest.mark.parametrize("flavour", HOST_FLAVOURS)
@pytest.mark.parametrize("bits", [0x7F800001, 0xFFFFFFFF, 0x7FC00000])
@pytest.mark.parametrize("place", [0, 17, 255, 511])
def test_a_nan_makes_its_blocks_scale_nan(place: int, bits: int, flavour: str) -> None:
    x = np.random.default_rng(0).standard_normal((1, 512), np.float32)
    x.view(np.uint32)[0, place] = bits
    scales = records_of(x, "Q8_0", flavour)[0, 512 : 512 + 64].view(np.float32)
    assert np.flatnonzero(np.isnan(scales)).tolist() == [place // 32]
    scales = records_of(x, "Q8_K", flavour)[0, 512 + 64 : 512 + 64 + 8].view(np.float32)
    assert np.flatnonzero(np.isnan(scales)).tolist() == [place // 256]


def floats_of(x: NDArray[np.float32], activation: str, flavour: str) -> NDArray[np.float32]:
    return records_of(x, activation, flavour).view(np.float32)[:, : x.shape[1]]


def assert_q8_0(x: NDArray[np.float32], flavour: str) -> None:
    count = x.shape[1]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        expected = gguf.quantize(x, GGMLQuantizationType.Q8_0).reshape(len(x), -1, 34)
    records = records_of(x, "Q8_0", flavour)
    scales = records[:, count : count + count // 8].view(np.float32)
    np.testing.assert_array_equal(scales, expected[..., :2].copy().view(np.float16)[..., 0].astype(np.float32))
    quants = records[:, :count].view(np.int8).reshape(len(x), -1, 32)
    # A scale that half precision has no room for makes the quants of its block meaningless.
    told = scales > 0
    np.testing.assert_array_equal(quants[told], expected[..., 2:].view(np.int8)[told])


def assert_q8_k(x: NDArray[np.float32], flavour: str) -> None:
    count = x.shape[1]
    quants, sums, scales = q8_k_parts(x)
    records = records_of(x, "Q8_K", flavour)
    np.testing.assert_array_equal(records[:, :count].view(np.int8).reshape(-1, 256), quants)
    np.testing.assert_array_equal(records[:, count : count + count // 8].view(np.int16).reshape(-1, 16), sums)
    begin = count + count // 8
    np.testing.assert_array_equal(records[:, begin : begin + count // 64].view(np.float32).reshape(-1, 1), scales)


def awkward_activations() -> NDArray[np.float32]:
    """Ties, equal extremes of both signs, zeros, and magnitudes from subnormal to large, one kind a token."""
    rng = np.random.default_rng(6)
    kinds = [rng.standard_normal(512, dtype=np.float32) * np.float32(10.0**power) for power in (-44, -39, -20, 0, 5)]
    kinds.append(np.resize(np.arange(-127, 128, dtype=np.float32) / 2, 512))  # quants at x.0 and x.5
    kinds.append(np.where(np.arange(512) % 7 == 3, np.float32(2), np.float32(-2)))
    kinds.append(np.where(np.arange(512) % 7 == 0, np.float32(2), np.float32(-2)))
    kinds.append(np.zeros(512, np.float32))
    kinds.append(np.full(512, -0.0, np.float32))
    kinds.append(np.eye(1, 512, 300, dtype=np.float32)[0] * np.float32(-3))
    return np.stack(kinds)


@pytest.mark.parametrize("flavour", HOST_FLAVOURS)
def test_rounding_to_q8_0_and_q8_k_follows_their_definitions(flavour: str) -> None:
    x = awkward_activations()
    assert_q8_0(x, flavour)
    assert_q8_k(x, flavour)


@settings(max_examples=60, deadline=None)
@given(arrays.arrays(np.float32, (2, 256), elements=st.floats(-1e6, 1e6, width=32)))
def test_rounding_follows_the_definitions_for_any_activations(x: NDArray[np.float32]) -> None:
    assert_q8_0(x, HOST_FLAVOURS[0])
    assert_q8_k(x, HOST_FLAVOURS[0])


@pytest.mark.parametrize("activation", ROUNDINGS)
def test_a_record_is_aligned_and_nothing_is_written_behind_it(activation: str) -> None:
    kernel = activation_kernel(activation)
    for columns in (256, 2048, 2816):
        record_bytes = kernel.bytes_for(columns)
        assert record_bytes % 64 == 0
        strided = np.random.default_rng(0).standard_normal((3, columns + 5), dtype=np.float32)[:, :columns]
        records = records_of(strided, activation, HOST_FLAVOURS[0])
        filled = columns // ROUNDINGS[activation].block_columns * ROUNDINGS[activation].block_bytes
        assert record_bytes - 64 < filled <= record_bytes
        assert (records[:, filled:] == 0xA5).all()
        alone = records_of(np.ascontiguousarray(strided[2:]), activation, HOST_FLAVOURS[0])
        np.testing.assert_array_equal(records[2:], alone)


def test_block_sizes_are_those_of_the_format() -> None:
    for type_name, row_dot in ROW_DOTS.items():
        assert (row_dot.block_columns, row_dot.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]


def test_a_type_without_a_kernel_is_refused_by_name() -> None:
    for refuse in (weight_kernel, lambda name: check_columns(name, 256)):
        with pytest.raises(UnsupportedCheckpoint, match=r"IQ1_S.*F32.*MXFP4.*Q4_K"):
            refuse("IQ1_S")


@pytest.mark.parametrize(("type_name", "columns"), [("Q4_K", 2048 + 32), ("Q8_0", 40), ("MXFP4", 0), ("F32", -1)])
def test_columns_that_are_not_whole_blocks_are_refused(type_name: str, columns: int) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=f"{columns} columns of type {type_name}"):
        check_columns(type_name, columns)
    check_columns(type_name, 2048)


def test_threads_that_ask_at_once_get_one_kernel() -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(weight_kernel("Q8_0"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [weight_kernel("Q8_0")] * 8
    assert found[0].activation == "Q8_0"


BASELINE = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
"""Makes numba compile for the oldest CPU of the architecture: no half precision, no fused multiply-add."""


def cache_hits_in_new_process(cache: Path, flavours: tuple[str, ...], environment: dict[str, str]) -> str:
    """Compile a few kernels in a new process, and say for each whether numba's cache had it."""
    code = (
        "from expertstream_engine.kernels.registry import compile_kernel\n"
        f"kernels = [compile_kernel('rows', name, flavour) for name in ('Q4_0', 'Q8_0') for flavour in {flavours}]\n"
        "kernels.append(compile_kernel('round_rows', 'Q8_0', 'generic'))\n"
        "print(*[kernel.cache_hits for kernel in kernels])"
    )
    environment = {**os.environ, **environment, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_a_second_process_compiles_nothing_and_kernels_never_mix_in_the_cache(tmp_path: Path) -> None:
    for flavours, environment in ((HOST_FLAVOURS, {}), (("generic",), BASELINE)):
        kernel_count = 2 * len(flavours) + 1
        for hit in "01":
            assert cache_hits_in_new_process(tmp_path, flavours, environment).split() == [hit] * kernel_count


@pytest.mark.skipif(HOST_FLAVOURS == ("generic",), reason="this CPU, or this run, has the baseline alone")
def test_all_of_this_holds_on_a_cpu_without_extensions() -> None:
    arguments = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "not process", __file__]
    done = subprocess.run(arguments, env={**os.environ, **BASELINE}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_generic_flavour_is_always_there() -> None:
    assert flavours_for(Target("aarch64-unknown-linux-gnu", "cortex-a76", frozenset({"neon"}))) == ("generic",)
    assert flavours_for(Target("x86_64", "alderlake", frozenset({"avx2", "fma", "avxvnni"}))) == tuple(FLAVOURS)
    assert flavours_for(Target("x86_64", "haswell", frozenset({"avx2", "fma"}))) == ("avx2", "generic")
    assert flavours_for(Target("x86_64", "skx", frozenset({"avx2", "avx512f", "avx512vl"}))) == ("avx2", "generic")
