"""Both CPU implementations of Ops, against formulas in float64 and against each other; bit for bit where promised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from expertstream.errors import UnsupportedCheckpoint, UsageError
from expertstream_engine.ops.numba_ops import NumbaOps, workspace_bytes
from expertstream_engine.ops.numpy_ops import NumpyOps
from expertstream_engine.ops.protocol import F32, I64, U8, ExpertFfn, Ops, Projection, QuantMatrix

THREADS = (1, 2, 3, 8)
SCALE_OFFSETS = {"Q4_K": (0, 2), "Q6_K": (208,)}  # of the float16 scales in a block
ROUNDED_TO = {"F16": "F16", "BF16": "BF16", "Q8_0": "Q8_0"}  # weight types whose activations gguf can round


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, NumbaOps]]:
    with ExitStack() as stack:
        yield {threads: stack.enter_context(NumbaOps(threads)) for threads in THREADS}


@pytest.fixture(params=["numpy", *THREADS])
def ops(request: pytest.FixtureRequest, pools: dict[int, NumbaOps]) -> Ops:
    return NumpyOps() if request.param == "numpy" else pools[request.param]


def floats(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def weights(type_name: str, rows: int, columns: int, seed: int) -> U8:
    """Bytes of a matrix, of random blocks where gguf cannot quantize."""
    kind = GGMLQuantizationType[type_name]
    if type_name not in SCALE_OFFSETS:
        values = floats(seed, rows, columns) / np.float32(columns**0.5)
        data = values if type_name == "F32" else quants.quantize(values, kind)
        return np.ascontiguousarray(data).view(np.uint8).reshape(rows, -1)
    block_columns, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // block_columns, block_bytes), np.uint8)
    for offset in SCALE_OFFSETS[type_name]:
        scales = random.uniform(-2e-4, 2e-4, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def matrix(type_name: str, rows: int, columns: int, seed: int = 1) -> QuantMatrix:
    return QuantMatrix(type_name, columns, weights(type_name, rows, columns, seed))


def values_of(type_name: str, data: U8) -> NDArray[np.float64]:
    return quants.dequantize(data, GGMLQuantizationType[type_name]).reshape(len(data), -1).astype(np.float64)


class Experts:
    """Experts of one layer, each projection of each at an address of its own, which is odd."""

    def __init__(self, types: tuple[str, str, str], count: int, hidden: int, width: int, seed: int = 5) -> None:
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        self.parts = [
            [
                weights(t, *shape, seed=100 * seed + 3 * e + n)
                for n, (t, shape) in enumerate(zip(types, shapes, strict=True))
            ]
            for e in range(count)
        ]
        self.ffn = ExpertFfn(
            *(
                Projection(t, *shape, self.parts[0][n].shape[1])
                for n, (t, shape) in enumerate(zip(types, shapes, strict=True))
            )
        )
        self.slots = [[np.concatenate([np.full(7, 255, np.uint8), part.ravel()]) for part in row] for row in self.parts]
        self.addresses = np.array([[slot.ctypes.data + 7 for slot in row] for row in self.slots], np.int64)

    def exactly(self, x: F32, starts: I64, tokens: I64) -> NDArray[np.float64]:
        """The FFN of every row in float64, with no activation rounded."""
        out = np.empty((len(tokens), self.ffn.down.rows))
        types = self.ffn.gate.type_name, self.ffn.up.type_name, self.ffn.down.type_name
        for e, parts in enumerate(self.parts):
            gate, up, down = (values_of(t, part) for t, part in zip(types, parts, strict=True))
            wanted = x[tokens[starts[e] : starts[e + 1]]].astype(np.float64)
            g = wanted @ gate.T
            with np.errstate(over="ignore"):
                out[starts[e] : starts[e + 1]] = (g / (1 + np.exp(-g)) * (wanted @ up.T)) @ down.T
        return out


STARTS = np.array([0, 3, 3, 43, 44, 61, 74])
TOKENS = np.random.default_rng(3).integers(0, 37, 74)


# Weights


@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 65])
def test_matmul_of_floats_is_the_product(ops: Ops, tokens: int) -> None:
    x = floats(0, tokens, 97)
    sizes = (1, 5, 77, 301)
    results = ops.matmul(x, *(matrix("F32", rows, 97, rows) for rows in sizes))
    for rows, result in zip(sizes, results, strict=True):
        expected = x.astype(np.float64) @ values_of("F32", weights("F32", rows, 97, rows)).T
        assert result.shape == (tokens, rows)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("type_name", ROUNDED_TO)
def test_matmul_rounds_activations_as_gguf_does(ops: Ops, type_name: str) -> None:
    kind = GGMLQuantizationType[ROUNDED_TO[type_name]]
    x = floats(0, 9, 96)
    x[3] = 0
    x[4] *= 1e4
    rounded = quants.dequantize(quants.quantize(x, kind), kind).reshape(x.shape).astype(np.float64)
    (result,) = ops.matmul(x, matrix(type_name, 50, 96))
    expected = rounded @ values_of(type_name, weights(type_name, 50, 96, 1)).T
    np.testing.assert_allclose(result, expected, rtol=0, atol=3e-6 * np.abs(x).max())


@pytest.mark.parametrize("type_name", SCALE_OFFSETS)
def test_matmul_is_exact_on_activations_that_rounding_keeps(ops: Ops, type_name: str) -> None:
    random = np.random.default_rng(0)
    whole = random.integers(-126, 127, (5, 512)).astype(np.float32)
    whole[:, [17, 300]] = -127, 127  # of largest magnitude in its block, so the step is 2**-7
    x = whole / 128
    (result,) = ops.matmul(x, matrix(type_name, 50, 512))
    expected = x.astype(np.float64) @ values_of(type_name, weights(type_name, 50, 512, 1)).T
    np.testing.assert_allclose(result, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_activations_that_are_all_but_zero_give_all_but_zero(ops: Ops, type_name: str) -> None:
    x = np.stack([np.zeros(512, np.float32), np.full(512, 1e-38, np.float32), np.full(512, -1e-45, np.float32)])
    (result,) = ops.matmul(x, matrix(type_name, 50, 512))
    assert (np.abs(result) < 1e-33).all()
    assert not result[0].any()


@pytest.mark.parametrize("threads", THREADS)
def test_matmul_of_mixed_types_equals_the_oracle(pools: dict[int, NumbaOps], threads: int) -> None:
    x = floats(0, 21, 512)
    matrices = [matrix(t, 60 + n, 512) for n, t in enumerate(("Q4_K", "F32", "Q6_K", "F16", "Q8_0", "BF16", "Q4_K"))]
    for result, expected in zip(pools[threads].matmul(x, *matrices), NumpyOps().matmul(x, *matrices), strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "Q4_K"])
def test_a_product_is_the_same_alone_and_in_any_company(ops: Ops, pools: dict[int, NumbaOps], type_name: str) -> None:
    x = floats(0, 70, 512)
    one, other = matrix(type_name, 333, 512), matrix("F16", 40, 512)
    _, together = ops.matmul(x, other, one)
    for token in (0, 1, 31, 32, 69):
        (alone,) = ops.matmul(x[token : token + 1], one)
        np.testing.assert_array_equal(alone[0], together[token])
    if isinstance(ops, NumbaOps):
        np.testing.assert_array_equal(together, pools[1].matmul(x, one)[0])


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q6_K"])
def test_embed_gives_the_rows_of_the_table(ops: Ops, type_name: str) -> None:
    table = matrix(type_name, 11, 256)
    ids = np.array([10, 0, 3, 3])
    np.testing.assert_array_equal(ops.embed(table, ids), values_of(type_name, table.data)[ids].astype(np.float32))
    assert ops.embed(table, ids[:0]).shape == (0, 256)


# Routed experts


@pytest.mark.parametrize("types", [("F32", "F32", "F32"), ("F16", "F16", "F32"), ("Q8_0", "F16", "F16")])
def test_routed_ffn_is_the_gated_ffn(ops: Ops, types: tuple[str, str, str]) -> None:
    experts = Experts(types, 6, 96, 160)
    x = floats(0, 37, 96)
    result = ops.routed_ffn(experts.ffn, experts.addresses, x, STARTS, TOKENS)
    expected = experts.exactly(x, STARTS, TOKENS)
    rounding = {"F32": 3e-6, "F16": 3e-3, "Q8_0": 3e-2}[types[0]]  # relative to the largest output
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(result, expected, rtol=0, atol=rounding * np.abs(expected).max())


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q8_0", "Q8_0"), ("Q4_K", "Q8_0", "Q4_K")])
@pytest.mark.parametrize("threads", THREADS)
def test_routed_ffn_is_made_of_matmuls(pools: dict[int, NumbaOps], threads: int, types: tuple[str, str, str]) -> None:
    """With an identity for down the hidden rows come out, and down of them is a matmul, bit for bit."""
    experts = Experts(types, 6, 256, 512)
    ops, x = pools[threads], floats(0, 37, 256)
    result = ops.routed_ffn(experts.ffn, experts.addresses, x, STARTS, TOKENS)
    identity = np.eye(512, dtype=np.float32)
    to_hidden = ExpertFfn(experts.ffn.gate, experts.ffn.up, Projection("F32", 512, 512, 2048))
    addresses = experts.addresses.copy()
    addresses[:, 2] = identity.ctypes.data
    hidden = ops.routed_ffn(to_hidden, addresses, x, STARTS, TOKENS)
    for e, (gate, up, down) in enumerate(experts.parts):
        mine = slice(STARTS[e], STARTS[e + 1])
        (g,), (u,) = (
            ops.matmul(x[TOKENS[mine]], QuantMatrix(part.type_name, 256, data))
            for part, data in ((experts.ffn.gate, gate), (experts.ffn.up, up))
        )
        exact = g.astype(np.float64) / (1 + np.exp(-g.astype(np.float64))) * u
        np.testing.assert_allclose(hidden[mine], exact, rtol=1e-6, atol=1e-30)
        (composed,) = ops.matmul(hidden[mine], QuantMatrix(types[2], 512, down))
        np.testing.assert_array_equal(result[mine], composed)


@pytest.mark.parametrize("types", [("F32", "F32", "F32"), ("Q4_K", "Q8_0", "Q6_K")])
def test_an_experts_row_is_the_same_alone_and_in_any_company(
    ops: Ops, pools: dict[int, NumbaOps], types: tuple[str, str, str]
) -> None:
    experts = Experts(types, 6, 256, 256)
    x = floats(0, 37, 256)
    together = ops.routed_ffn(experts.ffn, experts.addresses, x, STARTS, TOKENS)
    for e in range(6):
        mine = slice(STARTS[e], STARTS[e + 1])
        count = STARTS[e + 1] - STARTS[e]
        alone = ops.routed_ffn(experts.ffn, experts.addresses[e : e + 1], x, np.array([0, count]), TOKENS[mine])
        np.testing.assert_array_equal(alone, together[mine])
        for row in range(STARTS[e], STARTS[e + 1])[:2]:
            only = x[TOKENS[row]][None]
            single = ops.routed_ffn(
                experts.ffn, experts.addresses[e : e + 1], only, np.array([0, 1]), np.zeros(1, np.int64)
            )
            np.testing.assert_array_equal(single[0], together[row])
    if isinstance(ops, NumbaOps):
        one_thread = pools[1].routed_ffn(experts.ffn, experts.addresses, x, STARTS, TOKENS)
        np.testing.assert_array_equal(together, one_thread)


def test_decode_shares_its_one_row_among_all_experts(ops: Ops) -> None:
    experts = Experts(("F32", "F32", "F32"), 6, 96, 160)
    x = floats(0, 1, 96)
    starts = np.array([0, 1, 1, 2, 3, 4, 4])
    result = ops.routed_ffn(experts.ffn, experts.addresses, x, starts, np.zeros(4, np.int64))
    np.testing.assert_allclose(result, experts.exactly(x, starts, np.zeros(4, np.int64)), rtol=0, atol=3e-6)
    twice = np.array([0, 2, 2, 2, 2, 2, 2])
    result = ops.routed_ffn(experts.ffn, experts.addresses, x, twice, np.zeros(2, np.int64))
    np.testing.assert_allclose(result, experts.exactly(x, twice, np.zeros(2, np.int64)), rtol=0, atol=3e-6)


def test_routed_ffn_of_no_rows_is_empty(ops: Ops) -> None:
    experts = Experts(("F32", "F32", "F32"), 2, 96, 160)
    nothing = np.zeros(0, np.int64)
    result = ops.routed_ffn(experts.ffn, experts.addresses, floats(0, 3, 96), np.zeros(3, np.int64), nothing)
    assert result.shape == (0, 96)


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 50.0, 90.0, 1e3, 1e10])
def test_silu_is_right_where_its_exponential_over_and_underflows(ops: Ops, magnitude: float) -> None:
    """One input column of 1; gate is its weight, up is 1, down adds up nothing else."""
    gate = np.array([[1], [-1], [0.5], [-0.5]], np.float32) * np.float32(magnitude)
    up, down = np.ones((4, 1), np.float32), np.eye(4, dtype=np.float32)
    ffn = ExpertFfn(Projection("F32", 4, 1, 4), Projection("F32", 4, 1, 4), Projection("F32", 4, 4, 16))
    addresses = np.array([[gate.ctypes.data, up.ctypes.data, down.ctypes.data]])
    one, zero = np.ones((1, 1), np.float32), np.zeros(1, np.int64)
    (result,) = ops.routed_ffn(ffn, addresses, one, np.array([0, 1]), zero)
    wide = gate[:, 0].astype(np.float64)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(result, wide / (1 + np.exp(-wide)), rtol=1e-6, atol=1e-37)


# Everything else


def test_rms_norm_is_the_formula_for_any_shape(ops: Ops) -> None:
    for shape in ((7,), (3, 33), (5, 4, 130), (300, 130)):
        x, weight = floats(0, *shape), floats(1, shape[-1])
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
        result = ops.rms_norm(x, weight, 1e-5)
        assert result.shape == shape
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_rope_rotates_pairs_and_leaves_the_rest(ops: Ops, tokens: int, interleaved: bool) -> None:
    x, angles = floats(0, tokens, 5, 50), floats(1, tokens, 19)
    result = x.copy()
    ops.rope(result, np.cos(angles), np.sin(angles), interleaved)
    pairs = np.arange(38).reshape(19, 2) if interleaved else np.arange(38).reshape(2, 19).T
    turned = (x[..., pairs[:, 0]] + 1j * x[..., pairs[:, 1]]) * np.exp(1j * angles.astype(np.float64))[:, None]
    np.testing.assert_allclose(result[..., pairs[:, 0]], turned.real, rtol=0, atol=1e-6)
    np.testing.assert_allclose(result[..., pairs[:, 1]], turned.imag, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(result[..., 38:], x[..., 38:])


def attention_in_float64(q: F32, keys: F32, values: F32, first: int, scale: float) -> NDArray[np.float64]:
    tokens, heads, _ = q.shape
    group = heads // len(keys)
    scores = np.einsum("thd,hpd->thp", q.astype(np.float64), np.repeat(keys, group, 0).astype(np.float64)) * scale
    hidden = np.arange(keys.shape[1]) > first + np.arange(tokens)[:, None]
    scores[np.broadcast_to(hidden[:, None], scores.shape)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("thp,hpd->thd", shares, np.repeat(values, group, 0).astype(np.float64)).reshape(tokens, -1)


@pytest.mark.parametrize("first", [0, 1, 62, 63, 64, 65, 130])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(1, 1, 1), (7, 1, 20), (8, 2, 80), (6, 6, 128)])
def test_attention_is_causal_softmax(ops: Ops, heads: int, kv_heads: int, head_size: int, first: int) -> None:
    for tokens in (1, 4):
        q = floats(0, tokens, heads, head_size)
        keys, values = floats(1, kv_heads, 140, head_size), floats(2, kv_heads, 140, head_size)
        keys[:, first + tokens :] = values[:, first + tokens :] = np.nan  # not filled yet
        clean_keys, clean_values = np.nan_to_num(keys), np.nan_to_num(values)
        result = ops.attention(q, keys, values, first, head_size**-0.5)
        expected = attention_in_float64(q, clean_keys, clean_values, first, head_size**-0.5)
        assert result.shape == (tokens, heads * head_size)
        np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6)


def test_attention_survives_scores_that_no_exponential_holds(ops: Ops) -> None:
    q, keys, values = floats(0, 3, 4, 32), floats(1, 2, 200, 32), floats(2, 2, 200, 32)
    ascending = keys * np.linspace(0, 30, 200, dtype=np.float32)[:, None]
    result = ops.attention(q, ascending, values, 190, 3.0)
    np.testing.assert_allclose(result, attention_in_float64(q, ascending, values, 190, 3.0), rtol=0, atol=1e-4)


def test_a_tokens_attention_is_the_same_alone_and_in_any_company(ops: Ops, pools: dict[int, NumbaOps]) -> None:
    q, keys, values = floats(0, 70, 8, 48), floats(1, 2, 300, 48), floats(2, 2, 300, 48)
    together = ops.attention(q, keys, values, 200, 0.2)
    for token in (0, 1, 33, 69):
        alone = ops.attention(q[token : token + 1], keys, values, 200 + token, 0.2)
        np.testing.assert_array_equal(alone[0], together[token])
    if isinstance(ops, NumbaOps):
        np.testing.assert_array_equal(together, pools[1].attention(q, keys, values, 200, 0.2))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 8, 2), (5, 128, 8), (3, 4, 4), (300, 128, 6)])
def test_top_k_shares_out_the_softmax(ops: Ops, tokens: int, experts: int, k: int, normalize: bool) -> None:
    logits = np.round(floats(0, tokens, experts) * 8) / 4  # many equal ones
    ids, shares = ops.top_k(logits, k, normalize)
    for token in range(tokens):
        order = sorted(range(experts), key=lambda expert: (-logits[token, expert], expert))[:k]
        softmax = np.exp(logits[token].astype(np.float64))
        expected = softmax[order] / (softmax[order] if normalize else softmax).sum()
        assert ids[token].tolist() == order
        np.testing.assert_allclose(shares[token], expected, rtol=1e-6)


def test_top_k_of_far_apart_and_infinite_logits(ops: Ops) -> None:
    ids, shares = ops.top_k(np.array([[-np.inf, 500, -500, -np.inf]], np.float32), 3, True)
    assert ids.tolist() == [[1, 2, 0]]
    assert shares.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("wrong", [[0], [3], [5], range(6)])
def test_top_k_among_logits_that_are_no_numbers_says_so_in_the_shares(
    ops: Ops, wrong: Sequence[int], normalize: bool
) -> None:
    logits = np.array([[3, 1, 2, 0, 5, 4], [3, 1, 2, 0, 5, 4]], np.float32)
    logits[0, list(wrong)] = np.nan
    ids, shares = ops.top_k(logits, 2, normalize)
    assert len({0, 1, 2, 3, 4, 5}.intersection(ids[0].tolist())) == 2
    assert np.isnan(shares[0]).all()
    assert ids[1].tolist() == [4, 5]
    assert np.isfinite(shares[1]).all()


@pytest.mark.parametrize("columns", [1, 33, 700])
@pytest.mark.parametrize("rows", [0, 1, 74, 200])
def test_add_weighted_adds_in_the_order_of_rows(ops: Ops, rows: int, columns: int) -> None:
    total, added, shares = floats(0, 37, columns), floats(1, rows, columns), floats(2, rows)
    tokens = np.random.default_rng(3).integers(0, 37, rows)
    expected = total.copy()
    for row in range(rows):
        expected[tokens[row]] += shares[row] * added[row]
    ops.add_weighted(total, added, tokens, shares)
    np.testing.assert_array_equal(total, expected)


def test_results_stay_when_later_calls_grow_the_scratch(ops: Ops) -> None:
    one = matrix("Q8_0", 40, 96)
    x = floats(0, 3, 96)
    (early,) = ops.matmul(x, one)
    kept = early.copy()
    ops.matmul(floats(1, 400, 96), one)
    np.testing.assert_array_equal(early, kept)
    np.testing.assert_array_equal(ops.matmul(x, one)[0], kept)


@pytest.mark.parametrize("threads", [1, 3])
def test_workspace_bytes_is_what_is_held_in_the_end(threads: int) -> None:
    tokens, top_k = 50, 3
    q, keys = floats(0, tokens, 8, 64), floats(1, 2, tokens, 64)
    for types in (("F32", "F32", "F32"), ("Q4_K", "Q8_0", "Q6_K")):
        experts = Experts(types, 6, 256, 512)
        starts = np.array([0, 25, 50, 75, 100, 125, tokens * top_k])
        wide, narrow = matrix("Q4_K", 8, 2560), matrix("F16", 8, 2560)
        for calls in (("matmul",), ("ffn",), ("attention",), ("matmul", "ffn", "attention")):
            with NumbaOps(threads) as ops:
                if "matmul" in calls:
                    ops.matmul(floats(2, tokens, 2560), wide, narrow)
                if "ffn" in calls:
                    chosen = np.random.default_rng(3).integers(0, tokens, tokens * top_k)
                    ops.routed_ffn(experts.ffn, experts.addresses, floats(3, tokens, 256), starts, chosen)
                if "attention" in calls:
                    ops.attention(q, keys, keys, 0, 0.1)
                held = ops.held_workspace_bytes
            assert held == workspace_bytes(
                threads,
                tokens,
                matmuls=[(2560, ("Q4_K", "F16"))] if "matmul" in calls else [],
                ffns=[experts.ffn] if "ffn" in calls else [],
                experts=6,
                top_k=top_k,
                heads=8,
                kv_heads=2,
                head_size=64,
            )


# Refusals


def test_prepare_names_each_type_before_it_compiles_it(pools: dict[int, NumbaOps]) -> None:
    names: list[str] = []
    pools[2].prepare({"Q8_0", "F32"}, names.append)
    assert names[:2] == ["F32", "Q8_0"]
    assert "attention" in names


def test_prepare_refuses_a_type_without_a_kernel(ops: Ops) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"IQ1_S, TQ2_0; supported are .*Q4_K"):
        ops.prepare(["Q8_0", "TQ2_0", "IQ1_S"], lambda name: None)
    with pytest.raises(UnsupportedCheckpoint, match="TQ2_0"):
        workspace_bytes(
            1, 1, matmuls=[(256, ("TQ2_0",))], ffns=[], experts=1, top_k=1, heads=1, kv_heads=1, head_size=1
        )


def test_what_does_not_belong_together_is_refused(ops: Ops) -> None:
    x, numbers = floats(0, 3, 96), np.zeros(3, np.int64)
    experts = Experts(("F32", "F32", "F32"), 2, 96, 160)
    starts = np.array([0, 1, 3])
    f, a = experts.ffn, experts.addresses
    for call, message in (
        (lambda: ops.matmul(x), "no matrix"),
        (lambda: ops.matmul(x, matrix("F32", 4, 64)), "96 columns.*64"),
        (lambda: ops.matmul(x.astype(np.float64), matrix("F32", 4, 96)), "float64"),
        (lambda: ops.matmul(x[:, ::2], matrix("F32", 4, 48)), "C-contiguous"),
        (lambda: ops.embed(matrix("F32", 3, 96), np.array([3])), "ids"),
        (lambda: ops.embed(matrix("F32", 3, 96), np.array([-1])), "ids"),
        (lambda: ops.rms_norm(x, x[0, :95].copy(), 1e-5), "95"),
        (lambda: ops.rope(x[:, None], x[:, :49].copy(), x[:, :49].copy(), False), "rotated"),
        (lambda: ops.attention(x[:, None], x[None], x[None], 1, 1.0), "capacity|positions"),
        (lambda: ops.attention(x[:, None], x[None], x[None], -1, 1.0), "positions"),
        (lambda: ops.attention(x.reshape(3, 3, 32), x.reshape(2, 4, 36), x.reshape(2, 4, 36), 0, 1.0), "fit"),
        (lambda: ops.top_k(x, 97, True), "97 of 96"),
        (lambda: ops.top_k(x, 0, True), "0 of 96"),
        (lambda: ops.routed_ffn(f, a, floats(0, 3, 95), starts, numbers), "95 columns"),
        (lambda: ops.routed_ffn(f, a, x, starts[:2], numbers), "2 starts"),
        (lambda: ops.routed_ffn(f, a, x, np.array([0, 2, 2]), numbers), "starts"),
        (lambda: ops.routed_ffn(f, a, x, np.array([1, 2, 3]), numbers), "starts"),
        (lambda: ops.routed_ffn(f, a, x, np.array([0, 4, 3]), numbers), "starts"),
        (lambda: ops.routed_ffn(f, a, x, starts, numbers + 3), "tokens"),
        (lambda: ops.routed_ffn(f, a, x, starts, numbers - 1), "tokens"),
        (lambda: ops.routed_ffn(f, a.astype(np.int32), x, starts, numbers), "int64"),
        (lambda: ops.add_weighted(x.copy(), x, numbers + 3, x[:, 0].copy()), "tokens"),
        (lambda: ops.add_weighted(x.copy(), x, numbers[:2], x[:, 0].copy()), "2 tokens"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


@pytest.mark.parametrize("threads", [2])
def test_rows_that_are_not_whole_blocks_never_reach_a_kernel(pools: dict[int, NumbaOps], threads: int) -> None:
    ops = pools[threads]
    with pytest.raises(UnsupportedCheckpoint, match="100 columns"):
        ops.matmul(floats(0, 1, 100), QuantMatrix("Q8_0", 100, np.zeros((4, 106), np.uint8)))
    with pytest.raises(UsageError, match="34 bytes"):
        ops.matmul(floats(0, 1, 64), QuantMatrix("Q8_0", 64, np.zeros((4, 34), np.uint8)))
    with pytest.raises(UsageError, match="bytes of a row"):
        ops.matmul(floats(0, 1, 64), QuantMatrix("Q8_0", 64, np.zeros((4, 136), np.uint8)[:, :68]))


def test_nothing_runs_before_enter_or_after_exit() -> None:
    ops = NumbaOps(2)
    x, one = floats(0, 1, 32), matrix("Q8_0", 4, 32)
    with pytest.raises(UsageError, match="between enter and exit"):
        ops.matmul(x, one)
    with ops:
        ops.matmul(x, one)
        assert ops.held_workspace_bytes > 0
    assert ops.held_workspace_bytes == 0
    with pytest.raises(UsageError, match="between enter and exit"):
        ops.matmul(x, one)


def test_scratch_that_could_not_grow_is_not_used_as_if_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    from expertstream_engine.ops import numba_ops

    workspace = numba_ops._Workspace()
    workspace.reserve(1000)

    def no_memory(size_bytes: int) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(numba_ops._Workspace, "bytes_to_hold", staticmethod(no_memory))
        with pytest.raises(MemoryError):
            workspace.reserve(2000)
    address = workspace.reserve(500)
    held = workspace._held
    assert held.ctypes.data <= address
    assert address + 500 <= held.ctypes.data + held.nbytes
