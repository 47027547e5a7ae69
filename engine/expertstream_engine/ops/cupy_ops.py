"""Ops on a CUDA device: kernels of `expertstream_engine.cuda` on one stream, over weights in device memory.

Every sum has an order that the shapes alone decide, so results depend on nothing else. It owns the stream and a pool of
device memory; what a kernel does is in the .cu files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from types import TracebackType
from typing import Any, Self

import cupy
import numpy as np
from attrs import frozen
from cupy.cuda import driver, runtime
from numpy.typing import NDArray

from expertstream.errors import DeviceOutOfMemory, MachineError, UnsupportedCheckpoint, UsageError
from expertstream_engine.cuda.kernels import Kernels
from expertstream_engine.cuda.launching import Kernel
from expertstream_engine.cuda.tiling import THREADS, TOKENS_AT_ONCE, Tiling
from expertstream_engine.kernels.registry import SUPPORTED_TYPES, check_columns
from expertstream_engine.kernels.row_dots import ROW_DOTS
from expertstream_engine.ops import checks
from expertstream_engine.ops.protocol import F32, I64, NO_SHAPES, U8, ExpertFfn, KernelShapes, QuantMatrix, T

LARGEST_HEAD = 256
"""Elements of a head that attention goes up to: a thread has one each."""


def array_of(view: Any) -> Any:
    """A CuPy array of the memory of any view on a CUDA device, not a copy."""
    with _DRIVER_CALLS:
        return cupy.asarray(view) if hasattr(view, "__cuda_array_interface__") else cupy.from_dlpack(view)


class CupyOps:
    """An Ops on device number `device`, between enter and exit; its arrays are CuPy's.

    A call returns when its work is launched; `top_k` and `to_host` wait for their results. Matrices that it was given
    stay referenced until exit. `reserved_bytes` of device memory are taken at enter, for arrays to be cut from.
    """

    def __init__(self, device: int, reserved_bytes: int = 0) -> None:
        self._device = device
        self._reserved_bytes = reserved_bytes
        self._kernels = Kernels(_DRIVER_CALLS)
        self._open: _Open | None = None
        self._kept: list[Any] | None = None  # while recording: what a replay reads and writes

    def prepare(
        self, type_names: Collection[str], progress: Callable[[str], None], shapes: KernelShapes = NO_SHAPES
    ) -> None:
        checks.check_types(type_names, SUPPORTED_TYPES)
        kernels = self._kernels
        with _DRIVER_CALLS:
            runtime.setDevice(self._device)
            progress("layer")
            for name in _LAYER_KERNELS:
                kernels.layer(name)
            for form in sorted({ROW_DOTS[type_name].activation for type_name in type_names} - {"F32"}):
                kernels.layer(_FLOAT_ROUNDINGS[form] if form in _FLOAT_ROUNDINGS else _BLOCK_ROUNDINGS[form][0])
            if shapes.head_size is not None:
                _check_head(shapes.head_size)
                progress("attention")
                kernels.attention(shapes.head_size)
            if shapes.table is not None:
                progress(f"{shapes.table} table")
                kernels.embed(shapes.table)
            for type_name, columns in sorted(shapes.matrices):
                progress(f"{type_name}, {columns} columns")
                for tokens in (1, TOKENS_AT_ONCE):
                    kernels.multiply(type_name, Tiling.of(columns, tokens, type_name))
            for ffn in sorted(shapes.ffns, key=repr):
                gate, up, down = ffn.gate.type_name, ffn.up.type_name, ffn.down.type_name
                progress(f"experts of {gate}, {up} and {down}")
                for tokens in (1, TOKENS_AT_ONCE):
                    kernels.gate_up(gate, up, Tiling.of(ffn.gate.columns, tokens, gate, up))
                    kernels.down(down, Tiling.of(ffn.down.columns, tokens, down))

    def __enter__(self) -> Self:
        with _DRIVER_CALLS:
            runtime.setDevice(self._device)
            self._open = _Open(cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool())
        # Given back at once, and kept by the pool. The driver gives whole pages of 2 MiB to each allocation of more
        # than one, so that weights on their own would take up to twice their bytes.
        self._allocate(self._reserved_bytes)
        self._open.position = self._new((1,), np.int64)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            with _DRIVER_CALLS:
                runtime.setDevice(self._device)
                opened.stream.synchronize()
                pool = opened.pool
                del opened  # with all that it holds
                pool.free_all_blocks()

    @property
    def stream(self) -> int:
        """The stream's pointer."""
        return int(self._opened.stream.ptr)

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory that its pool holds: placed weights, arrays in use, and freed ones kept for reuse."""
        return int(self._opened.pool.total_bytes())

    def place(self, data: U8) -> U8:
        placed = self._new(data.shape, np.uint8)
        self._copy_in(_address(placed), data)
        with _DRIVER_CALLS:
            self._opened.stream.synchronize()  # the caller may give the source up
        return placed

    def array(self, host: F32) -> F32:
        placed = self._new(host.shape, np.float32)
        self._copy_in(_address(placed), np.ascontiguousarray(host, np.float32))
        return placed

    def to_host(self, x: F32) -> F32:
        host = np.empty(x.shape, np.float32)
        stream = self._opened.stream
        with _DRIVER_CALLS:
            runtime.memcpyAsync(host.ctypes.data, _address(x), host.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
            stream.synchronize()
        return host

    def empty(self, *shape: int) -> F32:
        return self._new(shape, np.float32)

    def zeros(self, *shape: int) -> F32:
        made = self._new(shape, np.float32)
        with _DRIVER_CALLS:
            runtime.memsetAsync(_address(made), 0, made.nbytes, self._opened.stream.ptr)
        return made

    def position(self, first: int) -> _Position:
        device = self._opened.position
        self._copy_in(_address(device), np.array([first], np.int64))
        return _Position(first, device)

    def repeated(self, key: Hashable, work: Callable[[], T]) -> T:
        recordings = self._opened.recordings
        found = recordings.get(key)
        if found is None:
            # The first time it only runs, and so brings about what a recording must not: plans and compiled kernels.
            first = work()
            recordings[key] = _Recording(None, None, [])  # no sooner: half of it brings about half of that
            return first
        if found.graph is None:
            found = recordings[key] = self._recorded(work)
        with _DRIVER_CALLS:
            found.graph.launch(self._opened.stream)
        result: T = found.result
        return result

    def copy(self, out: F32, x: F32) -> None:
        if out.shape != x.shape:
            raise UsageError(f"x of shape {x.shape} cannot be copied to {out.shape}")
        kind = runtime.memcpyDeviceToDevice
        with _DRIVER_CALLS:
            runtime.memcpyAsync(_address(out), _address(x), x.nbytes, kind, self._opened.stream.ptr)

    def rows(self, table: F32, first_position: _Position, count: int) -> F32:
        if not 0 <= first_position.first <= len(table) - count:
            raise checks.bad_range("rows")
        out = self._new((count, table.shape[1]), np.float32)
        self._elementwise("rows", out.size, table, first_position.device, count, table.shape[1], out)
        return out

    def add(self, total: F32, addend: F32) -> None:
        self._elementwise("add", total.size, total, addend, total.size)

    def append(self, cache: F32, rows: F32, first_position: _Position) -> None:
        tokens, heads, head_size = rows.shape
        if not 0 <= first_position.first <= cache.shape[1] - tokens:
            raise checks.bad_range("rows")
        self._elementwise(
            "append", rows.size, cache, rows, tokens, heads, head_size, cache.shape[1], first_position.device
        )

    def scatter(self, out: F32, places: I64, rows: F32) -> None:
        if not _all_below(places, out.shape[0]):
            raise checks.bad_range("places")
        columns = rows.shape[1]
        (where,) = self._send(places)
        grid = -(-columns // _THREADS), len(rows)
        self._launch(self._kernels.layer("scatter"), grid, _THREADS, out, where, rows, columns)

    def embed(self, table: QuantMatrix, ids: I64) -> F32:
        with _DRIVER_CALLS:
            runtime.setDevice(self._device)  # every pass begins here, in whichever thread
        checks.check_integers("ids", ids, 1)
        if not _all_below(ids, table.rows):
            raise checks.bad_range("ids")
        out = self._new((ids.size, table.columns), np.float32)
        (where,) = self._send(ids)
        grid = -(-table.columns // _THREADS), ids.size  # a thread a column or a part of a block
        self._launch(self._kernels.embed(table.type_name), grid, _THREADS, table.data, where, table.columns, out)
        return out

    def rms_norm(self, x: F32, weight: F32, epsilon: float) -> F32:
        checks.check_rms_norm(x, weight)
        out = self._new(x.shape, np.float32)
        columns = weight.shape[0]
        threads = 32 * min(max(columns // 128, 1), 32)
        self._launch(self._kernels.layer("rms_norm"), (x.size // columns,), threads, x, weight, columns, epsilon, out)
        return out

    def matmul(self, x: F32, *matrices: QuantMatrix) -> list[F32]:
        checks.check_matmul(x, matrices)
        opened = self._opened
        plan = opened.matmuls.get(matrices)
        if plan is None:
            plan = opened.matmuls[matrices] = self._matmul_plan(matrices)
        tokens, columns = x.shape
        records = {form: self._round(form, x) for form in {group.activation for group in plan.groups}}
        results: list[F32] = [x] * len(matrices)
        for group in plan.groups:
            out = self._new((tokens * group.rows,), np.float32)
            record, record_bytes = records[group.activation]
            tiling = Tiling.of(columns, tokens, group.type_name)
            self._launch(
                self._kernels.multiply(group.type_name, tiling),
                (tiling.blocks(group.most_rows), -(-tokens // tiling.tokens), len(group.places)),
                THREADS,
                group.table,
                record,
                record_bytes,
                tokens,
                out,
            )
            for place, first, last in group.places:
                results[place] = out[tokens * first : tokens * last].reshape(tokens, last - first)
        return results

    def rope(self, x: F32, cos: F32, sin: F32, interleaved: bool) -> None:
        checks.check_rope(x, cos, sin)
        tokens, heads, head_size = x.shape
        pairs = cos.shape[1]
        count = tokens * heads * pairs
        self._elementwise("rope", count, x, cos, sin, tokens, heads, head_size, pairs, int(interleaved))

    def attention(self, q: F32, keys: F32, values: F32, first_position: _Position, scale: float) -> F32:
        checks.check_attention(q, keys, values, first_position.first)
        tokens, heads, head_size = q.shape
        _check_head(head_size)
        out = self._new((tokens, heads * head_size), np.float32)
        kernel = self._kernels.attention(head_size)
        kv_heads, capacity, _ = keys.shape
        self._launch(
            kernel,
            (heads, tokens),
            _THREADS,
            q,
            keys,
            values,
            out,
            heads,
            kv_heads,
            capacity,
            first_position.device,
            scale,
        )
        return out

    def top_k(self, logits: F32, k: int, normalize: bool) -> tuple[I64, F32]:
        checks.check_top_k(logits, k)
        tokens, experts = logits.shape
        opened = self._opened
        ids, shares = opened.answers.room(tokens * k)
        # Written by the kernel straight into pinned host memory: one launch and one wait, no copy.
        self._launch(
            self._kernels.layer("top_k"), (tokens,), 32, logits, experts, k, int(normalize), ids.ctypes.data,
            shares.ctypes.data,
        )  # fmt: skip
        with _DRIVER_CALLS:
            opened.stream.synchronize()
        return ids.reshape(tokens, k).copy(), shares.reshape(tokens, k).copy()

    def routed_ffn(self, ffn: ExpertFfn, addresses: I64, x: F32, starts: I64, tokens: I64) -> F32:
        checks.check_routed(ffn, addresses, x, starts, tokens)
        rows, experts = tokens.size, len(addresses)
        lengths = np.diff(starts)
        if starts[0] or starts[-1] != rows or (experts and int(lengths.min()) < 0):
            raise checks.bad_range("starts")
        if not _all_below(tokens, x.shape[0]):
            raise checks.bad_range("tokens")
        _check_ffn(ffn, addresses)
        out = self._new((rows, ffn.down.rows), np.float32)
        if rows:
            longest = 1 if rows == experts and int(lengths.max()) == 1 else TOKENS_AT_ONCE
            where, begins, chosen = self._send(addresses, starts, tokens)
            self._launch_ffn(ffn, where, begins, chosen, experts, longest, x, out)
        return out

    def add_routed_token(self, total: F32, ffn: ExpertFfn, addresses: I64, x: F32, weights: F32) -> None:
        count = len(addresses)
        if x.shape != (1, ffn.gate.columns) or total.shape != (1, ffn.down.rows) or addresses.shape != (count, 3):
            raise UsageError(f"x {x.shape}, total {total.shape} and addresses {addresses.shape} do not fit {ffn}")
        _check_ffn(ffn, addresses)
        # What differs from call to call is put into one place; the rest is launched as before.
        room = self._opened.tokens.get(count) or self._token_room(count)
        self._copy_in(_address(room.sent), np.concatenate((addresses.reshape(-1).view(np.float32), weights)))

        def launch() -> None:
            rows = self._new((count, ffn.down.rows), np.float32)
            self._launch_ffn(ffn, room.addresses, None, room.zeros, count, 1, x, rows)
            columns = ffn.down.rows
            kernel, blocks = self._kernels.layer("add_routed"), -(-columns // _THREADS)
            self._launch(kernel, (blocks,), _THREADS, total, rows, room.weights, count, columns)

        self.repeated(("routed token", ffn, count, _address(x), _address(total)), launch)

    def add_weighted(self, total: F32, rows: F32, tokens: I64, weights: F32) -> None:
        checks.check_add_weighted(total, rows, tokens, weights)
        if not _all_below(tokens, total.shape[0]):
            raise checks.bad_range("tokens")
        if not tokens.size:
            return
        # Tokens are independent; those of one token are added by one thread a column, in their order.
        order = np.argsort(tokens, kind="stable")
        changes = np.flatnonzero(np.diff(tokens[order])) + 1
        starts = np.concatenate(([0], changes, [tokens.size]))
        each = tokens[order[starts[:-1]]]
        columns = total.shape[1]
        where, begins, places, shares = self._send(each, starts, order, weights)
        grid = -(-columns // _THREADS), each.size
        self._launch(
            self._kernels.layer("add_weighted"), grid, _THREADS, total, rows, where, begins, places, shares, columns
        )

    @property
    def _opened(self) -> _Open:
        if self._open is None:
            raise UsageError("CupyOps runs between enter and exit only")
        return self._open

    def _new(self, shape: tuple[int, ...], kind: type[Any]) -> NDArray[Any]:
        """An array of undefined content. Freed memory is used anew in the stream's order, so nothing waits for it."""
        nbytes = np.dtype(kind).itemsize
        for length in shape:
            nbytes *= length
        array: NDArray[Any] = cupy.ndarray(shape, kind, self._allocate(nbytes))
        if self._kept is not None:
            self._kept.append(array)
        return array

    def _allocate(self, nbytes: int) -> Any:
        """Memory of the pool, which goes back to it with the last reference."""
        with _DRIVER_CALLS:
            try:
                return self._opened.pool.malloc(nbytes)
            except cupy.cuda.memory.OutOfMemoryError as error:
                free_bytes, _ = runtime.memGetInfo()
                raise DeviceOutOfMemory(
                    f"{nbytes} bytes of device memory were asked for beside the slots; {free_bytes} are free"
                ) from error

    def _recorded(self, work: Callable[[], Any]) -> _Recording:
        """Launches nothing. Whatever memory it takes is kept, because every replay uses it."""
        stream = self._opened.stream
        kept: list[Any] = []
        self._kept = kept
        with _DRIVER_CALLS:
            stream.begin_capture()
            try:
                result = work()
            finally:
                self._kept = None
                graph = stream.end_capture()
        return _Recording(graph, result, kept)

    def _send(self, *arrays: NDArray[Any]) -> list[Any]:
        """Copies in device memory, as bytes; one transfer for all. To be kept until what reads them is launched."""
        ends = np.cumsum([-(-array.nbytes // 8) * 8 for array in arrays]).tolist()
        begins = [0, *ends[:-1]]
        room = np.empty(max(ends[-1], 8), np.uint8)
        for begin, array in zip(begins, arrays, strict=True):
            room[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        placed = self._new((room.size,), np.uint8)
        self._copy_in(_address(placed), room)
        return [placed[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def _copy_in(self, address: int, host: NDArray[Any]) -> None:
        """From pageable memory, which the driver has read when the call returns."""
        stream = self._opened.stream
        with _DRIVER_CALLS:
            runtime.memcpyAsync(address, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, stream.ptr)

    def _launch(self, kernel: Kernel, grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
        if 0 not in grid:
            with _DRIVER_CALLS:
                kernel(grid, threads, arguments, self._opened.stream)

    def _elementwise(self, name: str, count: int, *arguments: Any) -> None:
        self._launch(self._kernels.layer(name), (-(-count // _THREADS),), _THREADS, *arguments)

    def _token_room(self, count: int) -> _TokenRoom:
        sent: Any = self._new((7 * count,), np.float32)
        zeros = self._new((count,), np.int64)
        self._copy_in(_address(zeros), np.zeros(count, np.int64))
        room = self._opened.tokens[count] = _TokenRoom(sent, sent[: 6 * count], sent[6 * count :], zeros)
        return room

    def _launch_ffn(
        self, ffn: ExpertFfn, addresses: Any, starts: Any, tokens: Any, experts: int, longest: int, x: F32, out: F32
    ) -> None:
        """`longest` is the most rows of an expert, or 1: then row e is expert e's, and `starts` is not looked at."""
        gate, up, down = ffn.gate, ffn.up, ffn.down
        gate_form, up_form = (ROW_DOTS[part.type_name].activation for part in (gate, up))
        gate_records, gate_bytes = self._round(gate_form, x)
        up_records, up_bytes = (gate_records, gate_bytes) if up_form == gate_form else self._round(up_form, x)
        hidden = self._new((len(out), gate.rows), np.float32)
        tiling = Tiling.of(gate.columns, longest, gate.type_name, up.type_name)
        self._launch(
            self._kernels.gate_up(gate.type_name, up.type_name, tiling),
            (tiling.blocks(gate.rows), experts),
            THREADS,
            addresses,
            starts,
            tokens,
            gate_records,
            gate_bytes,
            up_records,
            up_bytes,
            gate.rows,
            hidden,
        )
        records, record_bytes = self._round(ROW_DOTS[down.type_name].activation, hidden)
        tiling = Tiling.of(down.columns, longest, down.type_name)
        self._launch(
            self._kernels.down(down.type_name, tiling),
            (tiling.blocks(down.rows), experts),
            THREADS,
            addresses,
            starts,
            records,
            record_bytes,
            down.rows,
            out,
        )

    def _round(self, form: str, x: F32) -> tuple[Any, int]:
        """The records of x in a format, and the bytes of one."""
        rows, columns = x.shape
        if form == "F32":
            return x, 4 * columns
        if form in _FLOAT_ROUNDINGS:
            out = self._new(x.shape, np.float32)
            self._elementwise(_FLOAT_ROUNDINGS[form], x.size, x, x.size, out)
            return out, 4 * columns
        kernel, block_columns, block_bytes = _BLOCK_ROUNDINGS[form]
        blocks = columns // block_columns
        record_bytes = -(-blocks * block_bytes // 16) * 16
        records = self._new((rows * record_bytes,), np.uint8)
        grid = -(-blocks // _ROUNDING_WARPS), rows
        self._launch(self._kernels.layer(kernel), grid, 32 * _ROUNDING_WARPS, x, columns, records, record_bytes)
        return records, record_bytes

    def _matmul_plan(self, matrices: tuple[QuantMatrix, ...]) -> _MatmulPlan:
        """The matrices of each type as one group, because one launch multiplies them all."""
        groups = []
        for type_name in dict.fromkeys(matrix.type_name for matrix in matrices):
            table, places, first = [], [], 0
            for place, matrix in enumerate(matrices):
                if matrix.type_name == type_name:
                    _check_row_bytes(type_name, matrix.columns, matrix.data.shape[-1])
                    if matrix.data.ndim != 2 or not matrix.data.flags.c_contiguous:
                        raise UsageError(f"a matrix is C-contiguous (rows, bytes of a row), not {matrix.data.shape}")
                    address = _address(matrix.data)
                    _check_alignment(type_name, address)
                    table += [address, matrix.rows, first]
                    places.append((place, first, first + matrix.rows))
                    first += matrix.rows
            held = self._new((len(table),), np.int64)
            self._copy_in(_address(held), np.array(table, np.int64))
            groups.append(_Group(type_name, ROW_DOTS[type_name].activation, held, first, tuple(places)))
        return _MatmulPlan(tuple(groups))


_LAYER_KERNELS = "rms_norm", "rope", "rows", "append", "top_k", "add", "add_routed", "add_weighted"
"""Those of layer.cu that every model launches, whatever its types; beside them, activations are rounded."""

_THREADS = 256  # of a block that is not made of warps; attention's kernel says the same
_ROUNDING_WARPS = 4
_FLOAT_ROUNDINGS = {"F16": "round_f16", "BF16": "round_bf16"}
_BLOCK_ROUNDINGS = {"Q8_0": ("round_q8_0", 32, 32 + 4), "Q8_K": ("round_q8_k", 256, 256 + 2 * 16 + 4)}
_ALIGNMENTS = {"Q4_K": 16, "Q5_K": 16, "IQ4_XS": 8, "Q2_K": 4, "F32": 4, "MXFP4": 1}
"""What addresses of rows are multiples of in weights.cuh; 2 for the types that are not named."""


class _Open:
    """What there is between enter and exit."""

    def __init__(self, stream: Any, pool: Any) -> None:
        self.stream = stream
        self.pool = pool
        self.position: Any = None  # of a pass's first token, on the device
        self.matmuls: dict[tuple[QuantMatrix, ...], _MatmulPlan] = {}
        self.recordings: dict[Hashable, _Recording] = {}
        self.tokens: dict[int, _TokenRoom] = {}
        self.answers = _Answers()


@frozen
class _Position:
    """A position, and where it lies on the device until there is another one."""

    first: int
    device: Any


@frozen(eq=False)
class _Recording:
    """A graph of launches with what they return and the memory that they use; no graph before it is recorded."""

    graph: Any
    result: Any
    kept: list[Any]


@frozen(eq=False)
class _TokenRoom:
    """Where addresses and weights of one token's experts are put on the device, views of `sent`; and as many zeros."""

    sent: Any
    addresses: Any
    weights: Any
    zeros: Any


class _Answers:
    """Pinned host memory that kernels write ids and shares to; it grows to the most asked for."""

    def __init__(self) -> None:
        self._count = 0
        self._ids: I64 = np.empty(0, np.int64)
        self._shares: F32 = np.empty(0, np.float32)

    def room(self, count: int) -> tuple[I64, F32]:
        """Ids and shares, `count` each, that the last call's answers no longer need."""
        if count > self._count:
            with _DRIVER_CALLS:
                memory = cupy.cuda.alloc_pinned_memory(12 * count)
            self._ids = np.frombuffer(memory, np.int64, count)
            self._shares = np.frombuffer(memory, np.float32, count, 8 * count)
            self._count = count
        return self._ids[:count], self._shares[:count]


@frozen(eq=False)
class _Group:
    """Matrices of one type: their table on the device, and (number, first row, end) of each among all the group's."""

    type_name: str
    activation: str
    table: Any
    rows: int
    places: tuple[tuple[int, int, int], ...]

    @property
    def most_rows(self) -> int:
        """Rows of the largest of them."""
        return max(last - first for _, first, last in self.places)


@frozen(eq=False)
class _MatmulPlan:
    groups: tuple[_Group, ...]


def _address(array: Any) -> int:
    """Of an array of CuPy's, for the driver and for kernels."""
    return int(array.data.ptr)


class _DriverCalls:
    """What CUDA raises inside, as MachineError. An error may come from any launch before the call that raises it.

    A class of its own without state, because it is entered for every launch: a generator's context costs more.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # CuPy loads and launches kernels by the driver's own interface, and asks the runtime for all else.
        if isinstance(error, runtime.CUDARuntimeError | driver.CUDADriverError):
            if error.status == _OUT_OF_MEMORY:
                raise DeviceOutOfMemory(f"memory that CUDA needs beside the slots cannot be had: {error}") from error
            raise MachineError(
                f"the CUDA device failed, and after most errors this process cannot use it any more: {error}"
            ) from error


_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY: driver_types.h, cuda.h
_DRIVER_CALLS = _DriverCalls()


def _all_below(numbers: I64, end: int) -> bool:
    return not numbers.size or (int(numbers.min()) >= 0 and int(numbers.max()) < end)


def _check_head(head_size: int) -> None:
    if head_size > LARGEST_HEAD:
        raise UnsupportedCheckpoint(f"heads of {head_size} elements; CUDA attention goes up to {LARGEST_HEAD}")


def _check_ffn(ffn: ExpertFfn, addresses: I64) -> None:
    together = np.bitwise_or.reduce(addresses, axis=0, initial=0).tolist()
    for part, bits in zip((ffn.gate, ffn.up, ffn.down), together, strict=True):
        _check_row_bytes(part.type_name, part.columns, part.row_bytes)
        _check_alignment(part.type_name, bits)


def _check_alignment(type_name: str, address_bits: int) -> None:
    alignment = _ALIGNMENTS.get(type_name, 2)
    if address_bits % alignment:
        raise UnsupportedCheckpoint(
            f"weights of type {type_name} begin at an address that is not a multiple of {alignment}, which CUDA kernels"
            f" need: the file aligns its tensors to less than that (general.alignment); write it again with 32"
        )


def _check_row_bytes(type_name: str, columns: int, row_bytes: int) -> None:
    check_columns(type_name, columns)
    row_dot = ROW_DOTS[type_name]
    expected = columns // row_dot.block_columns * row_dot.block_bytes
    if row_bytes != expected:
        raise UsageError(f"a row of {columns} columns of {type_name} has {expected} bytes, not {row_bytes} bytes")
