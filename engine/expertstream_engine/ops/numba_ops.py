"""Ops on the CPU: compiled jobs on a pool of threads, straight from the file's bytes.

This module writes the jobs' args and owns their scratch; what a job does with them is in `kernels.layer`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

import numpy as np
from attrs import frozen
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from expertstream.errors import UsageError
from expertstream_engine.kernels import layer
from expertstream_engine.kernels.activations import RECORD_ALIGNMENT_BYTES, ROUNDINGS
from expertstream_engine.kernels.layer import address_reader, all_below, are_starts, run_here
from expertstream_engine.kernels.pool import WorkerPool, job_address
from expertstream_engine.kernels.registry import SUPPORTED_TYPES, activation_kernel, check_columns, weight_kernel
from expertstream_engine.kernels.row_dots import ROW_DOTS
from expertstream_engine.ops import checks
from expertstream_engine.ops.host_arrays import HostArrays
from expertstream_engine.ops.numpy_ops import dequantize
from expertstream_engine.ops.protocol import F32, I64, NO_SHAPES, ExpertFfn, KernelShapes, QuantMatrix


class NumbaOps(HostArrays):
    """An Ops that runs on `threads` threads, the caller's among them, between enter and exit.

    Its scratch grows to what the largest call so far needed; `workspace_bytes` tells beforehand how much that is.
    Matrices that it was given stay referenced until exit.
    """

    def __init__(self, threads: int) -> None:
        self._pool = WorkerPool(threads)
        self._workspace = _Workspace()
        self._matmuls: dict[tuple[QuantMatrix, ...], _MatmulPlan] = {}
        self._ffns: dict[ExpertFfn, _FfnPlan] = {}
        block = np.zeros(layer.LAYER_WORDS, np.int64)
        self._block, self._block_address = block.data, int(block.ctypes.data)

    def prepare(
        self, type_names: Collection[str], progress: Callable[[str], None], shapes: KernelShapes = NO_SHAPES
    ) -> None:
        checks.check_types(type_names, SUPPORTED_TYPES)
        for type_name in sorted(type_names):
            progress(type_name)
            activation_kernel(weight_kernel(type_name).activation)
        for name, job in _JOBS.items():
            progress(name)
            job_address(job)
        for reader, examples in _READERS.items():
            for example in examples:
                reader(example)
        for function, signature in _ON_NUMBERS.items():
            function.compile(signature)

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)
        self._matmuls.clear()
        self._ffns.clear()
        self._workspace = _Workspace()

    @property
    def held_workspace_bytes(self) -> int:
        """Bytes of scratch held now."""
        return self._workspace.nbytes

    def embed(self, table: QuantMatrix, ids: I64) -> F32:
        checks.check_integers("ids", ids, 1)
        if not all_below(_words_1d(ids), ids.shape[0], table.rows):
            raise checks.bad_range("ids")
        return dequantize(table.type_name, table.data[ids])

    def rms_norm(self, x: F32, weight: F32, epsilon: float) -> F32:
        checks.check_rms_norm(x, weight)
        columns = weight.shape[0]
        rows = x.size // columns
        flat = x.reshape(rows, columns)
        out = np.empty((rows, columns), np.float32)
        _NORM.pack_into(
            self._block, 0, 0, _floats_2d(flat), _floats_1d(weight), _floats_2d(out), rows, columns, epsilon
        )
        self._run_small(layer.norm_job, x.size)
        return out.reshape(x.shape)

    def matmul(self, x: F32, *matrices: QuantMatrix) -> list[F32]:
        checks.check_matmul(x, matrices)
        plan = self._matmuls.get(matrices)
        if plan is None:
            plan = self._matmuls[matrices] = _MatmulPlan.of(matrices, self._pool.threads)
        tokens = x.shape[0]
        out = np.empty(tokens * plan.rows, np.float32)
        workspace = self._workspace.reserve(tokens * plan.token_bytes)
        _MATMUL.pack_into(plan.block, 0, 0, 0, _floats_2d(x), tokens, _floats_1d(out), workspace)
        self._pool.run(job_address(layer.matmul_job), plan.address)
        if len(matrices) == 1:
            return [out.reshape(tokens, plan.rows)]
        return [out[tokens * a : tokens * b].reshape(tokens, b - a) for a, b in plan.row_ranges]

    def rope(self, x: F32, cos: F32, sin: F32, interleaved: bool) -> None:
        checks.check_rope(x, cos, sin)
        tokens, heads, head_size = x.shape
        _ROPE.pack_into(
            self._block,
            0,
            0,
            _floats_3d(x),
            _floats_2d(cos),
            _floats_2d(sin),
            tokens,
            heads,
            head_size,
            cos.shape[1],
            interleaved,
        )
        self._run_small(layer.rope_job, x.size)

    def attention(self, q: F32, keys: F32, values: F32, first_position: int, scale: float) -> F32:
        checks.check_attention(q, keys, values, first_position)
        tokens, heads, head_size = q.shape
        kv_heads, capacity, _ = keys.shape
        out = np.empty((tokens, heads * head_size), np.float32)
        task_heads = _task_heads(tokens, heads, kv_heads, self._pool.threads)
        scratch = self._workspace.reserve(_attention_bytes(self._pool.threads, task_heads, head_size))
        _ATTENTION.pack_into(
            self._block,
            0,
            0,
            0,
            _floats_3d(q),
            _floats_3d(keys),
            _floats_3d(values),
            _floats_2d(out),
            tokens,
            heads,
            kv_heads,
            head_size,
            capacity,
            first_position,
            task_heads,
            scratch,
            scale,
        )
        self._pool.run(job_address(layer.attention_job), self._block_address)
        return out

    def top_k(self, logits: F32, k: int, normalize: bool) -> tuple[I64, F32]:
        checks.check_top_k(logits, k)
        tokens, experts = logits.shape
        ids = np.empty((tokens, k), np.int64)
        weights = np.empty((tokens, k), np.float32)
        _TOP_K.pack_into(
            self._block,
            0,
            0,
            _floats_2d(logits),
            _words_2d(ids),
            _floats_2d(weights),
            tokens,
            experts,
            k,
            normalize,
        )
        self._run_small(layer.top_k_job, logits.size)
        return ids, weights

    def routed_ffn(self, ffn: ExpertFfn, addresses: I64, x: F32, starts: I64, tokens: I64) -> F32:
        checks.check_routed(ffn, addresses, x, starts, tokens)
        rows, experts = tokens.shape[0], addresses.shape[0]
        starts_address, tokens_address = _words_1d(starts), _words_1d(tokens)
        if not are_starts(starts_address, experts + 1, rows):
            raise checks.bad_range("starts")
        if not all_below(tokens_address, rows, x.shape[0]):
            raise checks.bad_range("tokens")
        plan = self._ffns.get(ffn)
        if plan is None:
            plan = self._ffns[ffn] = _FfnPlan.of(ffn, self._pool.threads)
        out = np.empty((rows, ffn.down.rows), np.float32)
        scratch = plan.scratch
        progress = self._workspace.reserve(scratch.nbytes(rows, experts))
        rounded_x = progress + _aligned(_PROGRESS_BYTES * experts)
        hidden = rounded_x + rows * scratch.rounded_x_bytes
        rounded_hidden = hidden + rows * scratch.hidden_bytes
        seats = rounded_hidden + rows * scratch.rounded_hidden_bytes
        ctypes.memset(progress, 0, _PROGRESS_BYTES * experts)
        _FFN.pack_into(
            plan.block,
            0,
            0,
            0,
            0,
            _floats_2d(x),
            x.shape[0],
            rows,
            experts,
            starts_address,
            tokens_address,
            _words_2d(addresses),
            _floats_2d(out),
            progress,
            rounded_x,
            hidden,
            rounded_hidden,
            seats,
        )
        self._pool.run(job_address(layer.ffn_job), plan.address)
        return out

    def add_weighted(self, total: F32, rows: F32, tokens: I64, weights: F32) -> None:
        checks.check_add_weighted(total, rows, tokens, weights)
        tokens_address = _words_1d(tokens)
        if not all_below(tokens_address, tokens.shape[0], total.shape[0]):
            raise checks.bad_range("tokens")
        _ADD.pack_into(
            self._block,
            0,
            0,
            _floats_2d(total),
            _floats_2d(rows),
            tokens_address,
            _floats_1d(weights),
            rows.shape[0],
            rows.shape[1],
        )
        self._run_small(layer.add_job, rows.size)

    def _run_small(self, job: Callable[[int], None], elements: int) -> None:
        if elements < _SMALL_ELEMENTS:
            run_here(job_address(job), self._block_address)
        else:
            self._pool.run(job_address(job), self._block_address)


def workspace_bytes(
    threads: int,
    tokens: int,
    *,
    matmuls: Iterable[tuple[int, Collection[str]]],
    ffns: Iterable[ExpertFfn],
    experts: int,
    top_k: int,
    heads: int,
    kv_heads: int,
    head_size: int,
) -> int:
    """The most bytes of scratch that NumbaOps holds for calls of up to `tokens` tokens, exactly; compiles nothing.

    `matmuls` are the columns and the weight types of each call of matmul; `experts` is the most experts in a call of
    routed_ffn, of which each token takes `top_k`. The context adds nothing: attention goes along it in tiles.
    Raises UnsupportedCheckpoint for a type without a kernel.
    """
    most = _attention_bytes(threads, _task_heads(tokens, heads, kv_heads, threads), head_size)
    for columns, type_names in matmuls:
        most = max(most, tokens * sum(_record_bytes(form, columns) for form in _formats(type_names)))
    for ffn in ffns:
        most = max(most, _FfnScratch.of(ffn, threads).nbytes(tokens * top_k, experts))
    return _Workspace.bytes_to_hold(most)


# The first words of the blocks, in the order of `kernels.layer`.
_MATMUL = struct.Struct("=6q")
_FFN = struct.Struct("=16q")
_ATTENTION = struct.Struct("=14qd")
_NORM = struct.Struct("=6qd")
_ROPE = struct.Struct("=9q")
_TOP_K = struct.Struct("=8q")
_ADD = struct.Struct("=7q")

_JOBS: dict[str, Callable[[int], None]] = {
    "matmul": layer.matmul_job,
    "routed FFN": layer.ffn_job,
    "attention": layer.attention_job,
    "RMS norm": layer.norm_job,
    "rotary positions": layer.rope_job,
    "top-k": layer.top_k_job,
    "weighted sum": layer.add_job,
}

_floats_1d = address_reader("floats_1d")
_floats_2d = address_reader("floats_2d")
_floats_3d = address_reader("floats_3d")
_words_1d = address_reader("words_1d")
_words_2d = address_reader("words_2d")
_READERS: dict[Callable[[NDArray[Any]], int], list[NDArray[Any]]] = {
    _floats_1d: [np.empty(1, np.float32), np.frombuffer(bytes(4), np.float32)],  # weights are read-only: another type
    _floats_2d: [np.empty((1, 1), np.float32)],
    _floats_3d: [np.empty((1, 1, 1), np.float32)],
    _words_1d: [np.empty(1, np.int64)],
    _words_2d: [np.empty((1, 1), np.int64)],
}
_ON_NUMBERS: dict[Any, str] = {
    run_here: "(int64, int64)",
    all_below: "(int64, int64, int64)",
    are_starts: "(int64, int64, int64)",
}

_SMALL_ELEMENTS = 1 << 15  # some 10 us of work, about what it costs until a worker has joined and left
_TASKS_PER_THREAD = 4
_PROGRESS_BYTES = 16


class _Workspace:
    """One block of scratch, which a call uses from its beginning and nobody keeps."""

    def __init__(self) -> None:
        self._held = np.empty(0, np.uint8)
        self._address = 0
        self._room = 0

    @property
    def nbytes(self) -> int:
        return self._held.nbytes

    def reserve(self, nbytes: int) -> int:
        """The aligned address of `nbytes` of undefined content; ends what was reserved before."""
        if nbytes > self._room:
            # The old block goes before the new one comes; whatever ends this half-way leaves nothing that claims room.
            self._room = 0
            self._held = np.empty(0, np.uint8)
            self._held = np.empty(self.bytes_to_hold(nbytes), np.uint8)
            self._address = _aligned(int(self._held.ctypes.data))
            self._room = nbytes
        return self._address

    @staticmethod
    def bytes_to_hold(nbytes: int) -> int:
        """What a block has to have so that `nbytes` of it are aligned."""
        return nbytes + RECORD_ALIGNMENT_BYTES


@frozen(eq=False)
class _MatmulPlan:
    """What matmul needs to know of its matrices, with the block of args that is told all but the call itself.

    `token_bytes` are of the rounded columns of one token; `row_ranges` are where each matrix's rows are among all.
    """

    block: memoryview
    address: int
    rows: int
    token_bytes: int
    row_ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, matrices: tuple[QuantMatrix, ...], threads: int) -> Self:
        columns = matrices[0].columns
        for matrix in matrices:
            _check_row_bytes(matrix.type_name, columns, matrix.data.shape[-1])
            if matrix.data.ndim != 2 or not matrix.data.flags.c_contiguous:
                raise UsageError(f"a matrix is C-contiguous (rows, bytes of a row), not {matrix.data.shape}")
        formats = _formats(matrix.type_name for matrix in matrices)
        all_bytes = sum(matrix.data.nbytes for matrix in matrices)
        words = [0] * layer.MATMUL_COLUMNS + [columns, len(formats), len(matrices)]
        for form in formats:
            words += [activation_kernel(form).address, _record_bytes(form, columns)]
        for matrix in matrices:
            kernel = weight_kernel(matrix.type_name)
            row_bytes = matrix.data.shape[1]
            chunk = layer.chunk_rows(row_bytes, all_bytes, threads)
            address = int(matrix.data.ctypes.data)
            words += [kernel.address, formats.index(kernel.activation), address, row_bytes, matrix.rows, chunk]
        block = np.array(words, np.int64)
        ends = np.cumsum([0, *(matrix.rows for matrix in matrices)]).tolist()
        token_bytes = sum(_record_bytes(form, columns) for form in formats)
        return cls(block.data, int(block.ctypes.data), ends[-1], token_bytes, tuple(pairwise(ends)))


@frozen(eq=False)
class _FfnPlan:
    """What routed_ffn needs to know of a layer's experts, with the block of args that is told all but the call."""

    block: memoryview
    address: int
    scratch: _FfnScratch

    @classmethod
    def of(cls, ffn: ExpertFfn, threads: int) -> Self:
        for part in (ffn.gate, ffn.up, ffn.down):
            _check_row_bytes(part.type_name, part.columns, part.row_bytes)
        gate, up, down = (weight_kernel(part.type_name) for part in (ffn.gate, ffn.up, ffn.down))
        hidden = activation_kernel(down.activation)
        formats = _formats((ffn.gate.type_name, ffn.up.type_name))
        words = [0] * layer.FFN_THREADS + [
            threads,
            ffn.gate.columns,
            ffn.gate.rows,
            ffn.down.rows,
            gate.address,
            ffn.gate.row_bytes,
            up.address,
            ffn.up.row_bytes,
            formats.index(up.activation),
            down.address,
            ffn.down.row_bytes,
            hidden.address,
            hidden.bytes_for(ffn.down.columns),
        ]
        for form in formats:
            words += [activation_kernel(form).address, _record_bytes(form, ffn.gate.columns)]
        block = np.array(words, np.int64)
        return cls(block.data, int(block.ctypes.data), _FfnScratch.of(ffn, threads))


@frozen
class _FfnScratch:
    """Bytes of scratch of routed_ffn: three kinds for each row, and what all threads need whatever the rows."""

    rounded_x_bytes: int
    hidden_bytes: int
    rounded_hidden_bytes: int
    seats_bytes: int

    @classmethod
    def of(cls, ffn: ExpertFfn, threads: int) -> Self:
        (down_format,) = _formats((ffn.down.type_name,))
        return cls(
            sum(_record_bytes(form, ffn.gate.columns) for form in _formats((ffn.gate.type_name, ffn.up.type_name))),
            _aligned(4 * ffn.gate.rows),
            _record_bytes(down_format, ffn.down.columns),
            4 * threads * layer.TOKEN_TILE * layer.MOST_GATE_UP_ROWS,
        )

    def nbytes(self, rows: int, experts: int) -> int:
        """Bytes of a call with so many rows in all; progress comes first."""
        row_bytes = self.rounded_x_bytes + self.hidden_bytes + self.rounded_hidden_bytes
        return _aligned(_PROGRESS_BYTES * experts) + rows * row_bytes + self.seats_bytes


def _task_heads(tokens: int, heads: int, kv_heads: int, threads: int) -> int:
    """Heads of a task: as many that share a kv head as leave enough tasks for all threads."""
    group = heads // kv_heads
    wanted_tasks = _TASKS_PER_THREAD * threads
    for task_heads in range(group, 1, -1):
        if group % task_heads == 0 and heads // task_heads * tokens >= wanted_tasks:
            return task_heads
    return 1


def _attention_bytes(threads: int, task_heads: int, head_size: int) -> int:
    return 4 * threads * layer.attention_scratch_floats(task_heads, head_size)


def _formats(type_names: Iterable[str]) -> list[str]:
    """The distinct activation formats of weight types, in order of their first. Raises UnsupportedCheckpoint."""
    type_names = list(type_names)
    checks.check_types(type_names, SUPPORTED_TYPES)
    return list(dict.fromkeys(ROW_DOTS[type_name].activation for type_name in type_names))


def _record_bytes(form: str, columns: int) -> int:
    return ROUNDINGS[form].record_bytes(columns)


def _check_row_bytes(type_name: str, columns: int, row_bytes: int) -> None:
    check_columns(type_name, columns)
    block_columns, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    if row_bytes != columns // block_columns * block_bytes:
        raise UsageError(f"a row of {columns} columns of {type_name} does not have {row_bytes} bytes")


def _aligned(number: int) -> int:
    return -(-number // RECORD_ALIGNMENT_BYTES) * RECORD_ALIGNMENT_BYTES
