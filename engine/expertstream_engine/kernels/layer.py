"""The jobs that one layer of a model is made of: how its work is cut into tasks, and in which order.

The arithmetic on weights is in the weight kernels, which jobs call by address. Tasks are claimed in ascending
order and wait only for tasks with lower numbers, so a job ends with any number of threads. How work is cut never
changes a result: a row of a matrix, a token and a head are always summed in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertstream_engine.kernels.native import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_job,
    call_round_rows,
    call_rows,
    doubles_at,
    floats_at,
    njit,
    pause,
    sched_yield,
    times_power_of_two,
    words_at,
)

# Every job's args are a block of int64 words, and word 0 is the number of the next task. Where a word is an address it
# says so. The blocks are written by `expertstream_engine.ops.numba_ops`, in the order of these numbers.
NEXT = 0

MATMUL_ROUNDED = 1  # how many rounding tasks are done
MATMUL_X = 2  # address
MATMUL_TOKENS = 3
MATMUL_OUT = 4  # address: matrix after matrix, each (tokens, rows)
MATMUL_WORKSPACE = 5  # address: format after format, each (tokens, bytes of one)
MATMUL_COLUMNS = 6
MATMUL_FORMATS = 7
MATMUL_MATRICES = 8
MATMUL_RECORDS = 9  # FORMAT_WORDS for each format, then MATRIX_WORDS for each matrix

FORMAT_KERNEL = 0  # address
FORMAT_BYTES = 1
FORMAT_WORDS = 2

MATRIX_KERNEL = 0  # address
MATRIX_FORMAT = 1
MATRIX_WEIGHTS = 2  # address
MATRIX_ROW_BYTES = 3
MATRIX_ROWS = 4
MATRIX_CHUNK = 5  # rows of a task
MATRIX_WORDS = 6

FFN_ROUNDED = 1
FFN_SEATS = 2  # how many threads have joined
FFN_X = 3  # address
FFN_X_ROWS = 4
FFN_ROWS = 5  # length of tokens
FFN_EXPERTS = 6
FFN_STARTS = 7  # address
FFN_TOKENS = 8  # address
FFN_ADDRESSES = 9  # address
FFN_OUT = 10  # address
FFN_PROGRESS = (
    11  # address: for each expert, how many of its gate-and-up tasks are done, and whether its rows are ready
)
FFN_ROUNDED_X = 12  # address: format after format, each (rows, bytes of one)
FFN_HIDDEN = 13  # address: (rows, width) float32
FFN_ROUNDED_HIDDEN = 14  # address: (rows, bytes of one)
FFN_SCRATCH = 15  # address: for each seat (TOKEN_TILE, MOST_GATE_UP_ROWS) float32
FFN_THREADS = 16
FFN_COLUMNS = 17
FFN_WIDTH = 18
FFN_OUT_COLUMNS = 19
FFN_GATE_KERNEL = 20  # address
FFN_GATE_ROW_BYTES = 21
FFN_UP_KERNEL = 22  # address
FFN_UP_ROW_BYTES = 23
FFN_UP_FORMAT = 24  # 0 when gate and up share a format, else 1
FFN_DOWN_KERNEL = 25  # address
FFN_DOWN_ROW_BYTES = 26
FFN_HIDDEN_KERNEL = 27  # address: rounds for down
FFN_HIDDEN_BYTES = 28
FFN_RECORDS = 29  # FORMAT_WORDS for each format of x

ATTENTION_SEATS = 1
ATTENTION_Q = 2  # address
ATTENTION_KEYS = 3  # address
ATTENTION_VALUES = 4  # address
ATTENTION_OUT = 5  # address
ATTENTION_TOKENS = 6
ATTENTION_HEADS = 7
ATTENTION_KV_HEADS = 8
ATTENTION_HEAD_SIZE = 9
ATTENTION_CAPACITY = 10
ATTENTION_FIRST_POSITION = 11
ATTENTION_TASK_HEADS = 12  # heads of a task, a divisor of the heads that share a kv head
ATTENTION_SCRATCH = 13  # address: attention_scratch_floats for each seat
ATTENTION_SCALE = 14  # float64

NORM_X = 1  # address
NORM_WEIGHT = 2  # address
NORM_OUT = 3  # address
NORM_ROWS = 4
NORM_COLUMNS = 5
NORM_EPSILON = 6  # float64

ROPE_X = 1  # address
ROPE_COS = 2  # address
ROPE_SIN = 3  # address
ROPE_TOKENS = 4
ROPE_HEADS = 5
ROPE_HEAD_SIZE = 6
ROPE_PAIRS = 7
ROPE_INTERLEAVED = 8

TOP_LOGITS = 1  # address
TOP_IDS = 2  # address
TOP_WEIGHTS = 3  # address
TOP_TOKENS = 4
TOP_EXPERTS = 5
TOP_K = 6
TOP_NORMALIZE = 7

ADD_TOTAL = 1  # address
ADD_ROWS = 2  # address
ADD_TOKENS = 3  # address
ADD_WEIGHTS = 4  # address
ADD_ROW_COUNT = 5
ADD_COLUMNS = 6

LAYER_WORDS = 16  # enough for the block of any job but matmul and FFN, whose records vary

TOKEN_TILE = 32
"""How many tokens go through a chunk of weights at once: their rounded columns stay in a core's cache."""

MOST_GATE_UP_ROWS = 256
"""The most rows of a gate-and-up task, so that what it holds for TOKEN_TILE tokens stays in a core's cache."""

_ROUND_TILE = 8  # rows that a task rounds
_ROW_TILE = 8  # rows that a task normalizes, rotates or chooses of
_COLUMN_TILE = 256  # columns that a task adds to
_POSITION_TILE = 64  # positions whose keys and values go through the heads of a task at once
_MOST_CHUNK_BYTES = 1 << 19  # half a core's cache; smaller ones would often end what the prefetcher has just learned
_LEAST_CHUNK_BYTES = 1 << 15  # some 2 us of reading, beside which claiming a task is nothing
_CHUNKS_PER_THREAD = 4  # so that a thread that comes late leaves its share to the others
_SPINS = 2000  # some 50 us, then the thread that is waited for may need this core


def attention_scratch_floats(task_heads: int, head_size: int) -> int:
    """How much float32 scratch a thread needs for tasks of so many heads."""
    return -(-(_POSITION_TILE + head_size + 2 * task_heads) // 16) * 16


def chunk_rows(row_bytes: int, all_bytes: int, threads: int) -> int:
    """Rows of a task that reads weights, of `all_bytes` that the threads share; a multiple of 4."""
    chunk_bytes = min(max(all_bytes // (_CHUNKS_PER_THREAD * threads), _LEAST_CHUNK_BYTES), _MOST_CHUNK_BYTES)
    return max(chunk_bytes // row_bytes // 4 * 4, 4)


@njit(cache=True, error_model="numpy")
def run_here(job: int, args: int) -> None:
    """Run a job on the calling thread alone, the GIL kept: for work shorter than handing it out."""
    call_job(job, args)


def address_reader(kind: str) -> Callable[[NDArray[Any]], int]:
    """A function that tells where an array of one dtype and dimension begins, in a quarter of numpy's own time.

    Each `kind` has its own function, because processes that fill one index of numba's cache at once may swap entries.
    """

    def address(array: NDArray[Any]) -> int:
        return array.ctypes.data

    address.__name__ = address.__qualname__ = f"address_of_{kind}"
    reader: Callable[[NDArray[Any]], int] = njit(cache=True, error_model="numpy")(address)
    return reader


@njit(cache=True, error_model="numpy")
def all_below(numbers: int, count: int, limit: int) -> bool:
    """Whether `count` int64 at address `numbers` lie in [0, limit)."""
    values = words_at(numbers)
    for index in range(count):  # noqa: SIM110 -- numba compiles loops, not generators
        if values[index] < 0 or values[index] >= limit:
            return False
    return True


@njit(cache=True, error_model="numpy")
def are_starts(numbers: int, count: int, last: int) -> bool:
    """Whether `count` int64 at address `numbers` ascend from 0 to `last`."""
    values = words_at(numbers)
    for index in range(1, count):
        if values[index] < values[index - 1]:
            return False
    reaches: bool = values[0] == 0 and values[count - 1] == last
    return reaches


def matmul_job(args: int) -> None:
    """x times several matrices: rounding tasks by format and rows, then each matrix by chunks of rows."""
    block = words_at(args)
    tokens = block[MATMUL_TOKENS]
    formats = block[MATMUL_FORMATS]
    columns = block[MATMUL_COLUMNS]
    tiles = _parts(tokens, _ROUND_TILE)
    first_matrix = MATMUL_RECORDS + formats * FORMAT_WORDS
    while True:
        task = atomic_add(args, 1)
        if task < formats * tiles:
            record = MATMUL_RECORDS + task // tiles * FORMAT_WORDS
            activation_bytes = block[record + FORMAT_BYTES]
            start = task % tiles * _ROUND_TILE
            rounded = _rounded_at(args, MATMUL_RECORDS, task // tiles, block[MATMUL_WORKSPACE], tokens)
            call_round_rows(
                block[record + FORMAT_KERNEL],
                block[MATMUL_X] + 4 * start * columns,
                columns,
                columns,
                min(_ROUND_TILE, tokens - start),
                rounded + start * activation_bytes,
                activation_bytes,
            )
            atomic_add(args + 8 * MATMUL_ROUNDED, 1)
            continue
        task -= formats * tiles
        out = block[MATMUL_OUT]
        record = first_matrix
        for _ in range(block[MATMUL_MATRICES]):
            chunks = _parts(block[record + MATRIX_ROWS], block[record + MATRIX_CHUNK])
            if task < chunks:
                break
            task -= chunks
            out += 4 * tokens * block[record + MATRIX_ROWS]
            record += MATRIX_WORDS
        else:
            return
        _wait_for(args + 8 * MATMUL_ROUNDED, formats * tiles)
        first_row = task * block[record + MATRIX_CHUNK]
        last_row = min(first_row + block[record + MATRIX_CHUNK], block[record + MATRIX_ROWS])
        form = block[record + MATRIX_FORMAT]
        _rows_of_tokens(
            block[record + MATRIX_KERNEL],
            block[record + MATRIX_WEIGHTS],
            block[record + MATRIX_ROW_BYTES],
            first_row,
            last_row,
            columns,
            _rounded_at(args, MATMUL_RECORDS, form, block[MATMUL_WORKSPACE], tokens),
            block[MATMUL_RECORDS + form * FORMAT_WORDS + FORMAT_BYTES],
            tokens,
            out,
            block[record + MATRIX_ROWS],
        )


def ffn_job(args: int) -> None:
    """The gated FFN of several experts in one go.

    Tasks: rounding x by format and rows; gate and up of each expert by chunks of rows, where whoever ends an expert's
    last chunk rounds its hidden rows; down of each expert by chunks, which wait for that.
    """
    block = words_at(args)
    experts = block[FFN_EXPERTS]
    starts = words_at(block[FFN_STARTS])
    seat = atomic_add(args + 8 * FFN_SEATS, 1)
    shared = _shares_one_row(args)
    rounded_rows = 1 if shared else block[FFN_ROWS]
    tiles = _parts(rounded_rows, _ROUND_TILE)
    rounding_tasks = (1 + block[FFN_UP_FORMAT]) * tiles
    up_row_bytes = block[FFN_GATE_ROW_BYTES] + block[FFN_UP_ROW_BYTES]
    up_rows = _chunk_rows(up_row_bytes, experts * block[FFN_WIDTH] * up_row_bytes, block[FFN_THREADS])
    up_rows = min(up_rows, MOST_GATE_UP_ROWS)
    up_chunks = _parts(block[FFN_WIDTH], up_rows)
    down_row_bytes = block[FFN_DOWN_ROW_BYTES]
    down_rows = _chunk_rows(down_row_bytes, experts * block[FFN_OUT_COLUMNS] * down_row_bytes, block[FFN_THREADS])
    down_chunks = _parts(block[FFN_OUT_COLUMNS], down_rows)
    while True:
        task = atomic_add(args, 1)
        if task < rounding_tasks:
            _round_routed(args, task // tiles, task % tiles * _ROUND_TILE, rounded_rows)
            atomic_add(args + 8 * FFN_ROUNDED, 1)
            continue
        task -= rounding_tasks
        if task < experts * up_chunks:
            expert = task // up_chunks
            if starts[expert + 1] > starts[expert]:
                _wait_for(args + 8 * FFN_ROUNDED, rounding_tasks)
                _gate_up_chunk(args, expert, task % up_chunks * up_rows, up_rows, seat, shared)
                progress = block[FFN_PROGRESS] + 16 * expert
                if atomic_add(progress, 1) == up_chunks - 1:
                    _round_hidden(args, expert)
                    atomic_store(progress + 8, 1)
            continue
        task -= experts * up_chunks
        if task >= experts * down_chunks:
            return
        expert = task // down_chunks
        if starts[expert + 1] > starts[expert]:
            _wait_for(block[FFN_PROGRESS] + 16 * expert + 8, 1)
            _down_chunk(args, expert, task % down_chunks * down_rows, down_rows)


def attention_job(args: int) -> None:
    """Causal attention by kv head, some of its heads, and token; keys and values are read once a task.

    The softmax runs along tiles of positions: a running maximum, and sums that are scaled down whenever it grows.
    """
    block = words_at(args)
    tokens = block[ATTENTION_TOKENS]
    heads = block[ATTENTION_HEADS]
    head_size = block[ATTENTION_HEAD_SIZE]
    task_heads = block[ATTENTION_TASK_HEADS]
    group = heads // block[ATTENTION_KV_HEADS]
    scale = np.float32(doubles_at(args)[ATTENTION_SCALE])
    seat = atomic_add(args + 8 * ATTENTION_SEATS, 1)
    scratch = block[ATTENTION_SCRATCH] + 4 * seat * _attention_scratch_floats(task_heads, head_size)
    while True:
        task = atomic_add(args, 1)
        if task >= heads // task_heads * tokens:
            return
        first_head = task // tokens * task_heads
        token = task % tokens
        kv_start = first_head // group * block[ATTENTION_CAPACITY] * head_size * 4
        row = 4 * (token * heads + first_head) * head_size
        _attend(
            block[ATTENTION_Q] + row,
            block[ATTENTION_KEYS] + kv_start,
            block[ATTENTION_VALUES] + kv_start,
            block[ATTENTION_OUT] + row,
            task_heads,
            head_size,
            block[ATTENTION_FIRST_POSITION] + token + 1,
            scale,
            scratch,
        )


def norm_job(args: int) -> None:
    """RMS norm by rows; the mean is summed in float64."""
    block = words_at(args)
    columns = block[NORM_COLUMNS]
    weight = block[NORM_WEIGHT]
    epsilon = doubles_at(args)[NORM_EPSILON]
    while True:
        first = atomic_add(args, 1) * _ROW_TILE
        if first >= block[NORM_ROWS]:
            return
        for row in range(first, min(first + _ROW_TILE, block[NORM_ROWS])):
            start = 4 * row * columns
            inverse = np.float32(1 / math.sqrt(_sum_of_squares(block[NORM_X] + start, columns) / columns + epsilon))
            _scale_by(block[NORM_X] + start, inverse, weight, block[NORM_OUT] + start, columns)


def rope_job(args: int) -> None:
    """Rotary positions by tokens."""
    block = words_at(args)
    while True:
        first = atomic_add(args, 1) * _ROW_TILE
        if first >= block[ROPE_TOKENS]:
            return
        for token in range(first, min(first + _ROW_TILE, block[ROPE_TOKENS])):
            _rotate(args, token)


def top_k_job(args: int) -> None:
    """The k best logits by tokens, kept sorted while they are found, and their share of the softmax."""
    block = words_at(args)
    k = block[TOP_K]
    while True:
        first = atomic_add(args, 1) * _ROW_TILE
        if first >= block[TOP_TOKENS]:
            return
        for token in range(first, min(first + _ROW_TILE, block[TOP_TOKENS])):
            _choose(
                block[TOP_LOGITS] + 4 * token * block[TOP_EXPERTS],
                block[TOP_EXPERTS],
                k,
                block[TOP_NORMALIZE],
                block[TOP_IDS] + 8 * token * k,
                block[TOP_WEIGHTS] + 4 * token * k,
            )


def add_job(args: int) -> None:
    """Weighted rows added to the rows of their tokens, by columns, so that each sum keeps its order."""
    block = words_at(args)
    columns = block[ADD_COLUMNS]
    tokens = words_at(block[ADD_TOKENS])
    weights = floats_at(block[ADD_WEIGHTS])
    while True:
        first = atomic_add(args, 1) * _COLUMN_TILE
        if first >= columns:
            return
        count = min(_COLUMN_TILE, columns - first)
        for row in range(block[ADD_ROW_COUNT]):
            _add_scaled(
                block[ADD_TOTAL] + 4 * (tokens[row] * columns + first),
                block[ADD_ROWS] + 4 * (row * columns + first),
                weights[row],
                count,
            )


# Functions that only compiled code calls need no way in from Python, which would take half of the time to compile.
_INNER = {"cache": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@njit(**_INNER)
def _parts(whole: int, part: int) -> int:
    return (whole + part - 1) // part


_chunk_rows = njit(**_INNER)(chunk_rows)


@njit(**_INNER)
def _wait_for(word: int, value: int) -> None:
    spins = 0
    while atomic_load(word) != value:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            sched_yield()


@njit(**_INNER)
def _rounded_at(args: int, records: int, form: int, workspace: int, rows: int) -> int:
    block = words_at(args)
    for earlier in range(form):
        workspace += rows * block[records + earlier * FORMAT_WORDS + FORMAT_BYTES]
    return workspace


@njit(**_INNER)
def _rows_of_tokens(
    kernel: int,
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
    for start in range(0, tokens, TOKEN_TILE):
        call_rows(
            kernel,
            weights,
            row_bytes,
            first_row,
            last_row,
            columns,
            activations + start * activation_bytes,
            activation_bytes,
            min(TOKEN_TILE, tokens - start),
            out + 4 * start * out_stride,
            out_stride,
        )


@njit(**_INNER)
def _shares_one_row(args: int) -> bool:
    """Whether every expert's only row is the only row of x, as in the decode of one sequence."""
    block = words_at(args)
    starts = words_at(block[FFN_STARTS])
    if block[FFN_X_ROWS] != 1:
        return False
    for expert in range(block[FFN_EXPERTS]):  # noqa: SIM110 -- numba compiles loops, not generators
        if starts[expert + 1] - starts[expert] > 1:
            return False
    return True


@njit(**_INNER)
def _round_routed(args: int, form: int, first: int, rows: int) -> None:
    """Round rows of x in the order of the experts' rows, so that each expert finds its own one after the other."""
    block = words_at(args)
    tokens = words_at(block[FFN_TOKENS])
    columns = block[FFN_COLUMNS]
    record = FFN_RECORDS + form * FORMAT_WORDS
    activation_bytes = block[record + FORMAT_BYTES]
    rounded = _rounded_at(args, FFN_RECORDS, form, block[FFN_ROUNDED_X], rows)
    for row in range(first, min(first + _ROUND_TILE, rows)):
        call_round_rows(
            block[record + FORMAT_KERNEL],
            block[FFN_X] + 4 * tokens[row] * columns,
            columns,
            columns,
            1,
            rounded + row * activation_bytes,
            activation_bytes,
        )


@njit(**_INNER)
def _gate_up_chunk(args: int, expert: int, first_row: int, most_rows: int, seat: int, shared: bool) -> None:
    block = words_at(args)
    starts = words_at(block[FFN_STARTS])
    addresses = words_at(block[FFN_ADDRESSES])
    width = block[FFN_WIDTH]
    columns = block[FFN_COLUMNS]
    last_row = min(first_row + most_rows, width)
    rounded_rows = 1 if shared else block[FFN_ROWS]
    first_rounded = 0 if shared else starts[expert]
    rows = starts[expert + 1] - starts[expert]
    gate_bytes = block[FFN_RECORDS + FORMAT_BYTES]
    up_format = block[FFN_UP_FORMAT]
    up_bytes = block[FFN_RECORDS + up_format * FORMAT_WORDS + FORMAT_BYTES]
    for_gate = block[FFN_ROUNDED_X] + first_rounded * gate_bytes
    for_up = _rounded_at(args, FFN_RECORDS, up_format, block[FFN_ROUNDED_X], rounded_rows) + first_rounded * up_bytes
    scratch = block[FFN_SCRATCH] + 4 * seat * TOKEN_TILE * MOST_GATE_UP_ROWS
    for start in range(0, rows, TOKEN_TILE):
        tile = min(TOKEN_TILE, rows - start)
        hidden = block[FFN_HIDDEN] + 4 * (starts[expert] + start) * width
        call_rows(
            block[FFN_GATE_KERNEL],
            addresses[3 * expert],
            block[FFN_GATE_ROW_BYTES],
            first_row,
            last_row,
            columns,
            for_gate + start * gate_bytes,
            gate_bytes,
            tile,
            hidden,
            width,
        )
        call_rows(
            block[FFN_UP_KERNEL],
            addresses[3 * expert + 1],
            block[FFN_UP_ROW_BYTES],
            first_row,
            last_row,
            columns,
            for_up + start * up_bytes,
            up_bytes,
            tile,
            scratch - 4 * first_row,  # the kernel counts rows of the matrix, the scratch those of the chunk
            most_rows,
        )
        for token in range(tile):
            _silu_times(hidden + 4 * (token * width + first_row), scratch + 4 * token * most_rows, last_row - first_row)


@njit(**_INNER)
def _round_hidden(args: int, expert: int) -> None:
    block = words_at(args)
    starts = words_at(block[FFN_STARTS])
    width = block[FFN_WIDTH]
    call_round_rows(
        block[FFN_HIDDEN_KERNEL],
        block[FFN_HIDDEN] + 4 * starts[expert] * width,
        width,
        width,
        starts[expert + 1] - starts[expert],
        block[FFN_ROUNDED_HIDDEN] + starts[expert] * block[FFN_HIDDEN_BYTES],
        block[FFN_HIDDEN_BYTES],
    )


@njit(**_INNER)
def _down_chunk(args: int, expert: int, first_row: int, most_rows: int) -> None:
    block = words_at(args)
    starts = words_at(block[FFN_STARTS])
    _rows_of_tokens(
        block[FFN_DOWN_KERNEL],
        words_at(block[FFN_ADDRESSES])[3 * expert + 2],
        block[FFN_DOWN_ROW_BYTES],
        first_row,
        min(first_row + most_rows, block[FFN_OUT_COLUMNS]),
        block[FFN_WIDTH],
        block[FFN_ROUNDED_HIDDEN] + starts[expert] * block[FFN_HIDDEN_BYTES],
        block[FFN_HIDDEN_BYTES],
        starts[expert + 1] - starts[expert],
        block[FFN_OUT] + 4 * starts[expert] * block[FFN_OUT_COLUMNS],
        block[FFN_OUT_COLUMNS],
    )


# The exponential after Cephes' expf (S. Moshier): Cody and Waite's reduction by ln 2 in two parts, then a polynomial;
# within 2 units in the last place. No operation may be fused or reordered, so that it is the same in every lane.
_LOWEST = np.float32(-104)  # below it exp is 0 in float32
_HIGHEST = np.float32(89)  # above it exp is infinite
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_TO_WHOLE = np.float32(12582912)  # 1.5 * 2**23: adding it rounds to a whole number
_E0 = np.float32(1.9875691500e-4)
_E1 = np.float32(1.3981999507e-3)
_E2 = np.float32(8.3334519073e-3)
_E3 = np.float32(4.1665795894e-2)
_E4 = np.float32(1.6666665459e-1)
_E5 = np.float32(5.0000001201e-1)
_ONE = np.float32(1)
_ZERO = np.float32(0)


@njit(inline="always", **_INNER)
def _exp(x: np.float32) -> np.float32:
    bounded = _LOWEST if x < _LOWEST else x
    bounded = _HIGHEST if bounded > _HIGHEST else bounded
    power = (bounded * _LOG2_E + _TO_WHOLE) - _TO_WHOLE
    rest = (bounded - power * _LN2_HIGH) - power * _LN2_LOW
    series = ((((_E0 * rest + _E1) * rest + _E2) * rest + _E3) * rest + _E4) * rest + _E5
    return np.float32(times_power_of_two(series * (rest * rest) + rest + _ONE, power))


@njit(**_INNER)
def _silu_times(gate: int, up: int, count: int) -> None:
    gates = floats_at(gate)
    ups = floats_at(up)
    for index in range(count):
        value = gates[index]
        gates[index] = value / (_ONE + _exp(-value)) * ups[index]


# Sums may be taken in any order that does not depend on what else is in the call, so lanes may be summed apart.
_SUMS = {"reassoc", "contract", "nsz"}


@njit(fastmath=_SUMS, **_INNER)
def _sum_of_squares(x: int, count: int) -> float:
    values = floats_at(x)
    total = 0.0
    for index in range(count):
        value = np.float64(values[index])
        total += value * value
    return total


@njit(**_INNER)
def _scale_by(x: int, factor: np.float32, weight: int, out: int, count: int) -> None:
    values = floats_at(x)
    weights = floats_at(weight)
    results = floats_at(out)
    for index in range(count):
        results[index] = values[index] * factor * weights[index]


@njit(**_INNER)
def _add_scaled(total: int, row: int, weight: np.float32, count: int) -> None:
    totals = floats_at(total)
    values = floats_at(row)
    for index in range(count):
        totals[index] += weight * values[index]


@njit(**_INNER)
def _rotate(args: int, token: int) -> None:
    block = words_at(args)
    pairs = block[ROPE_PAIRS]
    cos = floats_at(block[ROPE_COS] + 4 * token * pairs)
    sin = floats_at(block[ROPE_SIN] + 4 * token * pairs)
    step = 2 if block[ROPE_INTERLEAVED] else 1
    apart = 1 if block[ROPE_INTERLEAVED] else pairs
    for head in range(block[ROPE_HEADS]):
        x = floats_at(block[ROPE_X] + 4 * (token * block[ROPE_HEADS] + head) * block[ROPE_HEAD_SIZE])
        for pair in range(pairs):
            first = x[step * pair]
            second = x[step * pair + apart]
            x[step * pair] = first * cos[pair] - second * sin[pair]
            x[step * pair + apart] = first * sin[pair] + second * cos[pair]


@njit(**_INNER)
def _choose(logits: int, experts: int, k: int, normalize: int, ids: int, weights: int) -> None:
    values = floats_at(logits)
    best = words_at(ids)
    shares = floats_at(weights)
    found = 0
    total = 0.0
    for expert in range(experts):
        value = values[expert]
        if value != value:
            total = np.nan  # makes every share NaN
        if found == k and not value > values[best[k - 1]]:  # so a NaN never displaces, and equals keep the lower id
            continue
        place = min(found, k - 1)
        while place > 0 and value > values[best[place - 1]]:
            best[place] = best[place - 1]
            place -= 1
        best[place] = expert
        found = min(found + 1, k)
    for place in range(k):
        shares[place] = _exp(values[best[place]] - values[best[0]])
        total += shares[place]
    if not normalize:
        total = 0.0
        for expert in range(experts):
            total += _exp(values[expert] - values[best[0]])
    for place in range(k):
        shares[place] = np.float32(shares[place] / total)


_attention_scratch_floats = njit(**_INNER)(attention_scratch_floats)


@njit(**_INNER)
def _attend(
    q: int, keys: int, values: int, out: int, heads: int, head_size: int, seen: int, scale: np.float32, scratch: int
) -> None:
    scores = scratch
    tile_sum = scores + 4 * _POSITION_TILE
    maxima = floats_at(tile_sum + 4 * head_size)
    sums = floats_at(tile_sum + 4 * (head_size + heads))
    for first in range(0, seen, _POSITION_TILE):
        count = min(_POSITION_TILE, seen - first)
        offset = 4 * first * head_size
        for head in range(heads):
            row = 4 * head * head_size
            highest = _score(q + row, keys + offset, head_size, count, scale, scores)
            if first == 0:
                _fill(out + row, _ZERO, head_size)
                maxima[head] = highest
                sums[head] = _ZERO
            kept = _ONE
            if highest > maxima[head]:
                kept = _exp(maxima[head] - highest)
                maxima[head] = highest
            sums[head] = sums[head] * kept + _exp_all(scores, maxima[head], count)
            _weigh(scores, values + offset, head_size, count, tile_sum)
            _scale_and_add(out + row, kept, tile_sum, head_size)
    for head in range(heads):
        _divide(out + 4 * head * head_size, sums[head], head_size)


@njit(fastmath=_SUMS, **_INNER)
def _score(q: int, keys: int, head_size: int, count: int, scale: np.float32, scores: int) -> np.float32:
    """Write scale * (q . key) for each key, four at a time so that q is loaded once for all; return the highest."""
    query = floats_at(q)
    results = floats_at(scores)
    fours = count // 4 * 4
    for position in range(0, fours, 4):
        a = floats_at(keys + 4 * position * head_size)
        b = floats_at(keys + 4 * (position + 1) * head_size)
        c = floats_at(keys + 4 * (position + 2) * head_size)
        d = floats_at(keys + 4 * (position + 3) * head_size)
        sum_a = sum_b = sum_c = sum_d = _ZERO
        for index in range(head_size):
            value = query[index]
            sum_a += value * a[index]
            sum_b += value * b[index]
            sum_c += value * c[index]
            sum_d += value * d[index]
        results[position] = sum_a * scale
        results[position + 1] = sum_b * scale
        results[position + 2] = sum_c * scale
        results[position + 3] = sum_d * scale
    for position in range(fours, count):
        a = floats_at(keys + 4 * position * head_size)
        sum_a = _ZERO
        for index in range(head_size):
            sum_a += query[index] * a[index]
        results[position] = sum_a * scale
    highest: np.float32 = results[0]
    for position in range(1, count):
        highest = results[position] if results[position] > highest else highest
    return highest


@njit(**_INNER)
def _exp_all(scores: int, highest: np.float32, count: int) -> np.float32:
    values = floats_at(scores)
    for position in range(count):
        values[position] = _exp(values[position] - highest)
    return np.float32(_sum(scores, count))


@njit(fastmath=_SUMS, **_INNER)
def _sum(scores: int, count: int) -> np.float32:
    values = floats_at(scores)
    total = _ZERO
    for position in range(count):
        total += values[position]
    return total


@njit(fastmath=_SUMS, **_INNER)
def _weigh(scores: int, values: int, head_size: int, count: int, out: int) -> None:
    """The weighted sum of `count` values, four at a time so that the sum is loaded and stored once for all."""
    weights = floats_at(scores)
    results = floats_at(out)
    _fill(out, _ZERO, head_size)
    fours = count // 4 * 4
    for position in range(0, fours, 4):
        a = floats_at(values + 4 * position * head_size)
        b = floats_at(values + 4 * (position + 1) * head_size)
        c = floats_at(values + 4 * (position + 2) * head_size)
        d = floats_at(values + 4 * (position + 3) * head_size)
        of_a = weights[position]
        of_b = weights[position + 1]
        of_c = weights[position + 2]
        of_d = weights[position + 3]
        for index in range(head_size):
            results[index] += of_a * a[index] + of_b * b[index] + of_c * c[index] + of_d * d[index]
    for position in range(fours, count):
        a = floats_at(values + 4 * position * head_size)
        of_a = weights[position]
        for index in range(head_size):
            results[index] += of_a * a[index]


@njit(**_INNER)
def _fill(out: int, value: np.float32, count: int) -> None:
    results = floats_at(out)
    for index in range(count):
        results[index] = value


@njit(**_INNER)
def _scale_and_add(out: int, factor: np.float32, addend: int, count: int) -> None:
    results = floats_at(out)
    values = floats_at(addend)
    for index in range(count):
        results[index] = results[index] * factor + values[index]


@njit(**_INNER)
def _divide(out: int, divisor: np.float32, count: int) -> None:
    results = floats_at(out)
    for index in range(count):
        results[index] /= divisor
