"""Ops on a CUDA device against formulas in float64, against the numpy oracle, and bit for bit where promised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from expertstream.errors import MachineError, UnsupportedCheckpoint, UsageError
from expertstream_engine.kernels.registry import SUPPORTED_TYPES
from expertstream_engine.ops.numpy_ops import NumpyOps, dequantize
from expertstream_engine.ops.protocol import F32, I64, U8, ExpertFfn, Projection, QuantMatrix
from gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

HALF_SCALES: dict[str, tuple[int, ...]] = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,)}
HALF_SCALES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
PLAIN_TYPES = ("F32", "F16", "BF16")


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    from expertstream_engine.ops.cupy_ops import CupyOps

    made = CupyOps(0)
    made.prepare(SUPPORTED_TYPES, lambda name: None)
    with made:
        yield made


def floats(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def weights(type_name: str, rows: int, columns: int, seed: int = 1) -> U8:
    """Rows whose quants, and integer scales, are any bytes at all, with sane float scales; some negative, one zero."""
    random = np.random.default_rng(seed)
    kind = GGMLQuantizationType[type_name]
    if type_name in PLAIN_TYPES:
        values = random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
        plain = values if type_name == "F32" else quants.quantize(values, kind)
        return np.ascontiguousarray(plain).view(np.uint8).reshape(rows, -1)
    block_columns, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * columns // block_columns, block_bytes), np.uint8)
    for offset in HALF_SCALES.get(type_name, ()):
        scales = random.standard_normal(len(blocks)).astype(np.float16) / np.float16(64)
        scales[0] = 0
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if type_name == "MXFP4":
        blocks[:, 0] = random.integers(118, 130, len(blocks))
    return blocks.reshape(rows, -1)


def on_host(type_name: str, rows: int, columns: int, seed: int = 1) -> QuantMatrix:
    return QuantMatrix(type_name, columns, weights(type_name, rows, columns, seed))


def on_device(ops: Any, matrix: QuantMatrix) -> QuantMatrix:
    return QuantMatrix(matrix.type_name, matrix.columns, ops.place(matrix.data))


class Experts:
    """Experts of one layer on host and device, each projection of each at an address of its own."""

    def __init__(self, ops: Any, types: tuple[str, str, str], count: int, hidden: int, width: int) -> None:
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        self.parts = [
            [weights(t, *shape, seed=500 + 3 * e + n) for n, (t, shape) in enumerate(zip(types, shapes, strict=True))]
            for e in range(count)
        ]
        self.ffn = ExpertFfn(
            *(
                Projection(t, *shape, self.parts[0][n].shape[1])
                for n, (t, shape) in enumerate(zip(types, shapes, strict=True))
            )
        )
        self.placed = [[ops.place(part) for part in expert] for expert in self.parts]
        self.addresses = np.array([[part.data.ptr for part in expert] for expert in self.placed], np.int64)
        self.host_addresses = np.array([[part.ctypes.data for part in expert] for expert in self.parts], np.int64)


def assert_close(result: F32, expected: NDArray[Any], of_largest: float = 3e-6) -> None:
    assert result.shape == expected.shape
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=0, atol=of_largest * np.abs(expected).max())


STARTS = np.array([0, 3, 3, 43, 44, 61, 74])
TOKENS = np.random.default_rng(3).integers(0, 37, 74)


# Weights


@pytest.mark.parametrize("tokens", [1, 2, 21])
@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_matmul_equals_the_oracle(ops: Any, type_name: str, tokens: int) -> None:
    for columns in (768, 2304):
        x, matrix = floats(0, tokens, columns), on_host(type_name, 77, columns)
        x[0, :256] = 0
        (result,) = ops.matmul(ops.array(x), on_device(ops, matrix))
        assert_close(ops.to_host(result), NumpyOps().matmul(x, matrix)[0])


def test_matmul_of_mixed_types_equals_the_oracle(ops: Any) -> None:
    x = floats(0, 9, 512)
    matrices = [
        on_host(t, 60 + n, 512, n) for n, t in enumerate(("Q4_K", "F32", "Q6_K", "F16", "Q4_K", "BF16", "Q8_0"))
    ]
    results = ops.matmul(ops.array(x), *(on_device(ops, matrix) for matrix in matrices))
    for result, expected in zip(results, NumpyOps().matmul(x, *matrices), strict=True):
        assert_close(ops.to_host(result), expected)


@pytest.mark.parametrize("columns", [1, 33, 97])
def test_matmul_of_floats_takes_any_number_of_columns(ops: Any, columns: int) -> None:
    x, matrix = floats(0, 3, columns), on_host("F32", 5, columns)
    (result,) = ops.matmul(ops.array(x), on_device(ops, matrix))
    assert_close(ops.to_host(result), x.astype(np.float64) @ dequantize("F32", matrix.data).astype(np.float64).T)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "Q8_0", "Q2_K", "IQ4_XS", "MXFP4"])
@pytest.mark.parametrize("columns", [13312, 14336])
def test_rows_that_do_not_fit_into_shared_memory_equal_the_oracle(
    ops: Any, columns: int, type_name: str, tokens: int
) -> None:
    x, matrix = floats(0, tokens, columns), on_host(type_name, 21, columns)
    (result,) = ops.matmul(ops.array(x), on_device(ops, matrix))
    assert_close(ops.to_host(result), NumpyOps().matmul(x, matrix)[0])


@pytest.mark.parametrize(
    ("type_name", "alignment"), [("Q6_K", 2), ("Q8_0", 2), ("Q3_K", 2), ("MXFP4", 1), ("Q2_K", 4), ("IQ4_XS", 8)]
)
def test_rows_may_begin_wherever_their_type_allows(ops: Any, type_name: str, alignment: int) -> None:
    matrix = on_host(type_name, 37, 768)
    x = ops.array(floats(0, 1, 768))
    (expected,) = ops.matmul(x, on_device(ops, matrix))
    for first in range(0, 16, alignment):
        placed = ops.place(np.concatenate((np.zeros(first, np.uint8), matrix.data.reshape(-1))))
        (result,) = ops.matmul(x, QuantMatrix(type_name, 768, placed[first:].reshape(matrix.data.shape)))
        np.testing.assert_array_equal(ops.to_host(result), ops.to_host(expected))


@pytest.mark.parametrize("columns", [512, 768, 14336])
@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "Q4_K", "Q6_K"])
def test_a_product_is_the_same_alone_and_in_any_company(ops: Any, type_name: str, columns: int) -> None:
    x = floats(0, 70, columns)
    one, other = (on_device(ops, on_host(t, rows, columns)) for t, rows in ((type_name, 333), ("F16", 40)))
    together = ops.to_host(ops.matmul(ops.array(x), other, one)[1])
    for token in (0, 1, 31, 32, 69):
        (alone,) = ops.matmul(ops.array(x[token : token + 1]), one)
        np.testing.assert_array_equal(ops.to_host(alone)[0], together[token])


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_activations_that_are_all_but_zero_give_all_but_zero(ops: Any, type_name: str) -> None:
    x = np.stack([np.zeros(512, np.float32), np.full(512, 1e-38, np.float32), np.full(512, -1e-45, np.float32)])
    result = ops.to_host(ops.matmul(ops.array(x), on_device(ops, on_host(type_name, 50, 512)))[0])
    assert (np.abs(result) < 1e-33).all()
    assert not result[0].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_what_is_not_finite_shows_in_every_product_of_its_row_and_in_no_other(
    ops: Any, type_name: str, value: float
) -> None:
    x, matrix = floats(0, 2, 768), on_device(ops, on_host(type_name, 77, 768))
    (expected,) = ops.matmul(ops.array(x), matrix)
    x[0, 500] = value
    (result,) = ops.matmul(ops.array(x), matrix)
    assert not np.isfinite(ops.to_host(result)[0]).any()
    np.testing.assert_array_equal(ops.to_host(result)[1], ops.to_host(expected)[1])


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_embed_gives_the_rows_of_the_table(ops: Any, type_name: str) -> None:
    table = on_host(type_name, 11, 768)
    ids = np.array([10, 0, 3, 3])
    result = ops.to_host(ops.embed(on_device(ops, table), ids))
    np.testing.assert_array_equal(result, dequantize(type_name, table.data)[ids])


# Routed experts


@pytest.mark.parametrize("types", [("F32", "F32", "F32"), ("F16", "F16", "F32"), ("F16", "F32", "F16")])
def test_routed_ffn_is_the_gated_ffn(ops: Any, types: tuple[str, str, str]) -> None:
    experts = Experts(ops, types, 6, 96, 160)
    x = floats(0, 37, 96)
    result = ops.to_host(ops.routed_ffn(experts.ffn, experts.addresses, ops.array(x), STARTS, TOKENS))
    expected = NumpyOps().routed_ffn(experts.ffn, experts.host_addresses, x, STARTS, TOKENS)
    assert_close(result, expected, 3e-3 if types[2] == "F16" else 3e-6)


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q8_0", "Q8_0"), ("Q4_K", "Q8_0", "Q4_K")])
def test_routed_ffn_is_made_of_matmuls(ops: Any, types: tuple[str, str, str]) -> None:
    """With an identity for down the hidden rows come out, and down of them is a matmul, bit for bit."""
    experts = Experts(ops, types, 6, 256, 512)
    x = floats(0, 37, 256)
    result = ops.to_host(ops.routed_ffn(experts.ffn, experts.addresses, ops.array(x), STARTS, TOKENS))
    identity = ops.array(np.eye(512, dtype=np.float32))
    to_hidden = ExpertFfn(experts.ffn.gate, experts.ffn.up, Projection("F32", 512, 512, 2048))
    addresses = experts.addresses.copy()
    addresses[:, 2] = identity.data.ptr
    hidden = ops.to_host(ops.routed_ffn(to_hidden, addresses, ops.array(x), STARTS, TOKENS))
    for e, (gate, up, down) in enumerate(experts.placed):
        mine = slice(STARTS[e], STARTS[e + 1])
        if mine.start == mine.stop:
            continue
        wanted = ops.array(x[TOKENS[mine]])
        g, u = (
            ops.to_host(ops.matmul(wanted, QuantMatrix(part.type_name, 256, data))[0]).astype(np.float64)
            for part, data in ((experts.ffn.gate, gate), (experts.ffn.up, up))
        )
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(hidden[mine], g / (1 + np.exp(-g)) * u, rtol=2e-6, atol=1e-30)
        (composed,) = ops.matmul(ops.array(hidden[mine]), QuantMatrix(types[2], 512, down))
        np.testing.assert_array_equal(result[mine], ops.to_host(composed))


@pytest.mark.parametrize("types", [("F32", "F32", "F32"), ("Q4_K", "Q8_0", "Q6_K")])
def test_an_experts_row_is_the_same_alone_and_in_any_company(ops: Any, types: tuple[str, str, str]) -> None:
    experts = Experts(ops, types, 6, 256, 256)
    x = floats(0, 37, 256)
    together = ops.to_host(ops.routed_ffn(experts.ffn, experts.addresses, ops.array(x), STARTS, TOKENS))
    for e in range(6):
        for row in range(STARTS[e], STARTS[e + 1])[:2]:
            only = ops.array(x[TOKENS[row]][None])
            where = experts.addresses[e : e + 1]
            single = ops.routed_ffn(experts.ffn, where, only, np.array([0, 1]), np.zeros(1, np.int64))
            np.testing.assert_array_equal(ops.to_host(single)[0], together[row])


def test_routed_ffn_of_no_rows_is_empty(ops: Any) -> None:
    experts = Experts(ops, ("F32", "F32", "F32"), 2, 96, 160)
    nothing = np.zeros(0, np.int64)
    result = ops.routed_ffn(experts.ffn, experts.addresses, ops.array(floats(0, 3, 96)), np.zeros(3, np.int64), nothing)
    assert result.shape == (0, 96)


@pytest.mark.parametrize("type_name", ["Q4_K", "Q5_K", "IQ4_XS", "Q2_K", "F32", "Q6_K"])
def test_weights_at_addresses_that_kernels_cannot_read_are_refused(ops: Any, type_name: str) -> None:
    experts = Experts(ops, (type_name,) * 3, 1, 256, 256)
    one, zero = ops.array(floats(0, 1, 256)), np.zeros(1, np.int64)
    with pytest.raises(UnsupportedCheckpoint, match=f"{type_name} begin at an address"):
        ops.routed_ffn(experts.ffn, experts.addresses + 1, one, np.array([0, 1]), zero)


# Everything else


def test_rms_norm_is_the_formula_for_any_shape(ops: Any) -> None:
    for shape in ((7,), (3, 33), (5, 4, 130), (300, 130), (2, 5000)):
        x, weight = floats(0, *shape), floats(1, shape[-1])
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
        result = ops.to_host(ops.rms_norm(ops.array(x), ops.array(weight), 1e-5))
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_rope_equals_the_oracle_bit_for_bit(ops: Any, tokens: int, interleaved: bool) -> None:
    x, angles = floats(0, tokens, 5, 50), floats(1, tokens, 19)
    placed = ops.array(x)
    ops.rope(placed, ops.array(np.cos(angles)), ops.array(np.sin(angles)), interleaved)
    NumpyOps().rope(x, np.cos(angles), np.sin(angles), interleaved)
    np.testing.assert_array_equal(ops.to_host(placed), x)


@pytest.mark.parametrize("first", [0, 1, 62, 63, 64, 255, 256, 600])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(1, 1, 1), (7, 1, 20), (8, 2, 80), (6, 6, 128), (2, 1, 256)]
)
def test_attention_is_causal_softmax(ops: Any, heads: int, kv_heads: int, head_size: int, first: int) -> None:
    for tokens in (1, 4):
        q = floats(0, tokens, heads, head_size)
        keys, values = floats(1, kv_heads, 640, head_size), floats(2, kv_heads, 640, head_size)
        expected = NumpyOps().attention(q, keys, values, first, head_size**-0.5)
        keys[:, first + tokens :] = values[:, first + tokens :] = np.nan  # not filled yet
        result = ops.attention(ops.array(q), ops.array(keys), ops.array(values), ops.position(first), head_size**-0.5)
        np.testing.assert_allclose(ops.to_host(result), expected, rtol=0, atol=3e-6)


def test_attention_survives_scores_that_no_exponential_holds(ops: Any) -> None:
    q, keys, values = floats(0, 3, 4, 32), floats(1, 2, 400, 32), floats(2, 2, 400, 32)
    ascending = keys * np.linspace(0, 30, 400, dtype=np.float32)[:, None]
    result = ops.to_host(ops.attention(ops.array(q), ops.array(ascending), ops.array(values), ops.position(390), 3.0))
    np.testing.assert_allclose(result, NumpyOps().attention(q, ascending, values, 390, 3.0), rtol=0, atol=1e-4)


def test_a_tokens_attention_is_the_same_alone_and_in_any_company(ops: Any) -> None:
    q, keys, values = floats(0, 70, 8, 48), ops.array(floats(1, 2, 400, 48)), ops.array(floats(2, 2, 400, 48))
    together = ops.to_host(ops.attention(ops.array(q), keys, values, ops.position(250), 0.2))
    for token in (0, 1, 5, 6, 33, 69):
        alone = ops.to_host(
            ops.attention(ops.array(q[token : token + 1]), keys, values, ops.position(250 + token), 0.2)
        )
        np.testing.assert_array_equal(alone[0], together[token])


def test_a_head_larger_than_the_kernels_reach_is_refused(ops: Any) -> None:
    q, cache = ops.array(floats(0, 1, 1, 257)), ops.array(floats(0, 1, 4, 257))
    with pytest.raises(UnsupportedCheckpoint, match="257 elements"):
        ops.attention(q, cache, cache, ops.position(0), 1.0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 8, 2), (5, 128, 8), (3, 4, 4), (300, 128, 6), (2, 257, 40)])
def test_top_k_shares_out_the_softmax(ops: Any, tokens: int, experts: int, k: int, normalize: bool) -> None:
    logits = np.round(floats(0, tokens, experts) * 8) / 4  # many equal ones
    ids, shares = ops.top_k(ops.array(logits), k, normalize)
    expected_ids, expected_shares = NumpyOps().top_k(logits, k, normalize)
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(shares, expected_shares, rtol=2e-6)


def test_top_k_of_far_apart_and_infinite_logits(ops: Any) -> None:
    ids, shares = ops.top_k(ops.array(np.array([[-np.inf, 500, -500, -np.inf]], np.float32)), 3, True)
    assert ids.tolist() == [[1, 2, 0]]
    assert shares.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("wrong", [[0], [40], [99], range(100)])
def test_top_k_among_logits_that_are_no_numbers_says_so_in_the_shares(
    ops: Any, wrong: Sequence[int], normalize: bool
) -> None:
    logits = np.random.default_rng(0).permutation(100).astype(np.float32)
    both = np.stack([logits, logits])
    both[0, list(wrong)] = np.nan
    ids, shares = ops.top_k(ops.array(both), 8, normalize)
    assert len(set(range(100)).intersection(ids[0].tolist())) == 8
    assert np.isnan(shares[0]).all()
    assert ids[1].tolist() == np.argsort(-logits)[:8].tolist()
    assert np.isfinite(shares[1]).all()


@pytest.mark.parametrize("columns", [1, 33, 700])
@pytest.mark.parametrize("rows", [0, 1, 74, 200])
def test_add_weighted_adds_in_the_order_of_rows(ops: Any, rows: int, columns: int) -> None:
    total, added, shares = floats(0, 37, columns), floats(1, rows, columns), floats(2, rows)
    tokens: I64 = np.random.default_rng(3).integers(0, 37, rows)
    placed = ops.array(total)
    ops.add_weighted(placed, ops.array(added), tokens, shares)
    for row in range(rows):
        total[tokens[row]] += shares[row] * added[row]
    np.testing.assert_array_equal(ops.to_host(placed), total)


def test_rows_are_joined_appended_and_added(ops: Any) -> None:
    rows, total = floats(0, 3, 70), floats(1, 5, 70)
    placed = ops.array(total)
    ops.scatter(placed, np.array([4, 0, 2]), ops.array(rows))
    total[[4, 0, 2]] = rows
    ops.add(placed, placed)
    np.testing.assert_array_equal(ops.to_host(placed), total + total)
    cache, new = ops.zeros(2, 9, 5), floats(2, 4, 2, 5)
    ops.append(cache, ops.array(new), ops.position(3))
    expected = np.zeros((2, 9, 5), np.float32)
    expected[:, 3:7] = new.transpose(1, 0, 2)
    np.testing.assert_array_equal(ops.to_host(cache), expected)


def test_the_same_calls_give_the_same_bits(ops: Any) -> None:
    experts = Experts(ops, ("Q4_K", "Q4_K", "Q6_K"), 6, 256, 512)
    x = ops.array(floats(0, 37, 256))
    first = ops.to_host(ops.routed_ffn(experts.ffn, experts.addresses, x, STARTS, TOKENS))
    for _ in range(20):
        again = ops.to_host(ops.routed_ffn(experts.ffn, experts.addresses, x, STARTS, TOKENS))
        np.testing.assert_array_equal(again, first)


def test_one_tokens_experts_are_added_as_by_the_single_steps(ops: Any) -> None:
    experts = Experts(ops, ("Q4_K", "Q4_K", "Q6_K"), 5, 256, 512)
    x, shares, zero = ops.array(floats(0, 1, 256)), floats(1, 5), np.zeros(5, np.int64)
    total = ops.array(floats(2, 1, 256))
    for number in range(4):  # run, recorded, and replayed with other experts
        order = np.roll(np.arange(5), number)
        expected, routed = ops.empty(1, 256), ops.zeros(1, 256)
        ops.copy(expected, total)
        where = np.ascontiguousarray(experts.addresses[order])
        rows = ops.routed_ffn(experts.ffn, where, x, np.arange(6), zero)
        ops.add_weighted(routed, rows, zero, shares[order])
        ops.add(expected, routed)
        ops.add_routed_token(total, experts.ffn, where, x, shares[order])
        np.testing.assert_array_equal(ops.to_host(total), ops.to_host(expected))


def test_repeated_work_goes_by_the_position_and_what_its_arrays_hold_now(ops: Any) -> None:
    table, x = floats(0, 50, 30), ops.array(floats(1, 1, 30))
    placed, one = ops.array(table), ops.array(np.ones((1, 30), np.float32))
    expected = ops.to_host(x)

    def work() -> Any:
        ops.add(x, ops.rows(placed, first, 1))
        return ops.rms_norm(x, one.reshape(-1), 1e-6)

    for position in (3, 17, 49, 0, 20):
        first = ops.position(position)
        result = ops.to_host(ops.repeated("test", work))
        expected = expected + table[position]
        np.testing.assert_array_equal(ops.to_host(x), expected)
        np.testing.assert_allclose(result, NumpyOps().rms_norm(expected, np.ones(30, np.float32), 1e-6), rtol=1e-6)


def test_a_kernel_that_begins_early_sees_all_that_the_ones_before_it_wrote(ops: Any) -> None:
    """A long row of launches, of which each needs what the last one wrote, against the same with a wait after each."""
    matrices = [on_device(ops, on_host(t, 512, 512, n)) for n, t in enumerate(("Q4_K", "Q6_K", "Q8_0", "F16"))]
    norm, x = ops.array(np.ones(512, np.float32)), ops.array(floats(0, 1, 512))

    def step(number: int, h: Any) -> Any:
        (product,) = ops.matmul(ops.rms_norm(h, norm, 1e-6), matrices[number % len(matrices)])
        ops.add(product, x)
        return product

    def work() -> Any:
        h = x
        for number in range(200):
            h = step(number, h)
        return h

    expected = x
    for number in range(200):
        expected = step(number, expected)
        ops.to_host(expected)
    for _ in range(20):
        np.testing.assert_array_equal(ops.to_host(ops.repeated("early", work)), ops.to_host(expected))


# Refusals


def test_what_does_not_belong_together_is_refused(ops: Any) -> None:
    x, numbers = ops.array(floats(0, 3, 96)), np.zeros(3, np.int64)
    experts = Experts(ops, ("F32", "F32", "F32"), 2, 96, 160)
    f, a = experts.ffn, experts.addresses
    starts = np.array([0, 1, 3])
    for call, message in (
        (lambda: ops.matmul(x), "no matrix"),
        (lambda: ops.embed(on_device(ops, on_host("F32", 3, 96)), np.array([3])), "ids"),
        (lambda: ops.embed(on_device(ops, on_host("F32", 3, 96)), np.array([-1])), "ids"),
        (lambda: ops.top_k(x, 97, True), "97 of 96"),
        (lambda: ops.routed_ffn(f, a, x, np.array([0, 2, 2]), numbers), "starts"),
        (lambda: ops.routed_ffn(f, a, x, np.array([0, 4, 3]), numbers), "starts"),
        (lambda: ops.routed_ffn(f, a, x, starts, numbers + 3), "tokens"),
        (lambda: ops.add_weighted(x, x, numbers + 3, np.zeros(3, np.float32)), "tokens"),
        (lambda: ops.rows(x, ops.position(1), 3), "rows"),
        (lambda: ops.copy(x, x[:2]), "copied"),
        (lambda: ops.add_routed_token(x, f, a, x, floats(0, 2)), "do not fit"),
        (lambda: ops.scatter(x, numbers + 3, x), "places"),
        (lambda: ops.append(x.reshape(1, 3, 96), x.reshape(3, 1, 96), ops.position(1)), "rows"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_nothing_runs_before_enter_or_after_exit() -> None:
    from expertstream_engine.ops.cupy_ops import CupyOps

    made = CupyOps(0)
    with pytest.raises(UsageError, match="between enter and exit"):
        made.zeros(1)
    with made:
        made.zeros(1)
    with pytest.raises(UsageError, match="between enter and exit"):
        made.zeros(1)


def test_prepare_refuses_a_type_without_a_kernel(ops: Any) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"TQ2_0; supported are .*Q4_K"):
        ops.prepare(["TQ2_0"], lambda name: None)


def test_a_launch_that_the_driver_refuses_is_a_machine_error_and_the_device_works_on(ops: Any) -> None:
    x = ops.array(floats(1, 4, 8))
    with pytest.raises(MachineError):
        ops._launch(ops._kernels.layer("add"), (1,), 1 << 20, x, x, x.size)
    assert ops.to_host(x).tobytes() == floats(1, 4, 8).tobytes()
