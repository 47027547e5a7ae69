"""The resident weights of a model: which tensors it needs, checked before a byte is read, and their shapes.

It owns names and shapes; how the numbers are used is the model's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from expertstream import Checkpoint, ExpertLayer, ResidentTensors, TensorInfo, UnsupportedCheckpoint
from expertstream_engine.architecture import ModelShape
from expertstream_engine.ops.protocol import F32, I64, ExpertFfn, KernelShapes, Projection, QuantMatrix


@frozen(eq=False)
class AttentionWeights:
    """One block's attention; the norms of queries and keys are None where the architecture has none."""

    norm: F32
    query: QuantMatrix
    key: QuantMatrix
    value: QuantMatrix
    output: QuantMatrix
    query_norm: F32 | None
    key_norm: F32 | None


@frozen(eq=False)
class RoutedWeights:
    """One block's router, and where its experts' gate, up and down begin in a slot: (experts, 3), bytes."""

    norm: F32
    router: QuantMatrix
    ffn: ExpertFfn
    positions: I64


@frozen(eq=False)
class Weights:
    """All that stays resident. `rope_factors` divide the rotary frequencies: on the host, None where there are none."""

    embedding: QuantMatrix
    output_norm: F32
    output: QuantMatrix
    rope_factors: F32 | None
    attention: tuple[AttentionWeights, ...]
    routed: tuple[RoutedWeights, ...]


def weight_types(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The ggml types of all matrices of the checkpoint, sorted: what needs kernels."""
    matrices = {tensor.type_name for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2}
    return tuple(sorted(matrices | {part.type_name for layer in checkpoint.layers for part in layer.parts}))


def kernel_shapes(checkpoint: Checkpoint, shape: ModelShape) -> KernelShapes:
    """What the model multiplies with, for kernels that are compiled for shapes."""
    tensors = checkpoint.tensors
    multiplied = [name for name in tensors if name != "token_embd.weight" or "output.weight" not in tensors]
    return KernelShapes(
        matrices=frozenset(
            (tensors[name].type_name, tensors[name].shape[1]) for name in multiplied if len(tensors[name].shape) == 2
        ),
        table=tensors["token_embd.weight"].type_name,
        ffns=frozenset(expert_ffn(layer, checkpoint, shape) for layer in checkpoint.layers),
        head_size=shape.head_size,
    )


def check_tensors(checkpoint: Checkpoint, shape: ModelShape) -> None:
    """Refuse a checkpoint that lacks a tensor, has one misshaped, or has one that the model would not use.

    Raises UnsupportedCheckpoint naming the tensors. Reads no tensor's bytes.
    """
    tensors = _Tensors(checkpoint, None, lambda data: data)
    _assemble(tensors, checkpoint, shape, lambda layer: np.zeros((shape.expert_count, len(layer.parts)), np.int64))
    unused = sorted(checkpoint.tensors.keys() - tensors.asked)
    if unused:
        raise UnsupportedCheckpoint(
            f"{checkpoint.files[0]}: {len(unused)} tensors have no place in this version's {shape.architecture}"
            f" model, and computing without them would give wrong text: {', '.join(unused[:8])}"
        )


def assemble_weights(
    checkpoint: Checkpoint,
    shape: ModelShape,
    resident: ResidentTensors,
    part_positions: Callable[[int], NDArray[np.int64]],
    place: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] = lambda data: data,
) -> Weights:
    """The weights as views of `resident`, each put where `place` puts it.

    What was copied there leaves `resident` at once, so that at most one tensor is in memory twice. `part_positions`
    answers as `ExpertStreamer.part_positions`, `place` as `Ops.place`.
    """
    tensors = _Tensors(checkpoint, resident, place)
    return _assemble(tensors, checkpoint, shape, lambda layer: part_positions(layer.layer))


def _assemble(
    tensors: _Tensors,
    checkpoint: Checkpoint,
    shape: ModelShape,
    part_positions: Callable[[ExpertLayer], NDArray[np.int64]],
) -> Weights:
    hidden, head = shape.hidden_size, shape.head_size
    query_rows, kv_rows = shape.head_count * head, shape.kv_head_count * head
    norm_sizes = {"none": None, "head": (head, head), "all": (query_rows, kv_rows)}[shape.query_key_norm]
    layers = {layer.layer: layer for layer in checkpoint.layers}
    if len(layers) != shape.block_count or max(layers) >= shape.block_count:
        raise UnsupportedCheckpoint(
            f"{checkpoint.files[0]}: {len(layers)} blocks have routed experts, up to block {max(layers)}, and the"
            f" metadata say that there are {shape.block_count}: this version's {shape.architecture} has some in each"
        )
    attention, routed = [], []
    for block in range(shape.block_count):
        prefix = f"blk.{block}."
        attention.append(
            AttentionWeights(
                norm=tensors.vector(prefix + "attn_norm.weight", hidden),
                query=tensors.matrix(prefix + "attn_q.weight", query_rows, hidden),
                key=tensors.matrix(prefix + "attn_k.weight", kv_rows, hidden),
                value=tensors.matrix(prefix + "attn_v.weight", kv_rows, hidden),
                output=tensors.matrix(prefix + "attn_output.weight", hidden, query_rows),
                query_norm=tensors.vector(prefix + "attn_q_norm.weight", norm_sizes[0]) if norm_sizes else None,
                key_norm=tensors.vector(prefix + "attn_k_norm.weight", norm_sizes[1]) if norm_sizes else None,
            )
        )
        ffn = expert_ffn(layers[block], checkpoint, shape)
        routed.append(
            RoutedWeights(
                norm=tensors.vector(prefix + "ffn_norm.weight", hidden),
                router=tensors.matrix(prefix + "ffn_gate_inp.weight", shape.expert_count, hidden),
                ffn=ffn,
                positions=_expert_positions(layers[block], ffn, part_positions(layers[block])),
            )
        )
    embedding = tensors.matrix("token_embd.weight", None, hidden)
    tied = "output.weight" not in checkpoint.tensors
    return Weights(
        embedding=embedding,
        output_norm=tensors.vector("output_norm.weight", hidden),
        output=embedding if tied else tensors.matrix("output.weight", embedding.rows, hidden),
        rope_factors=(
            tensors.vector("rope_freqs.weight", shape.rope_size // 2, placed=False)
            if "rope_freqs.weight" in checkpoint.tensors
            else None
        ),
        attention=tuple(attention),
        routed=tuple(routed),
    )


def expert_ffn(layer: ExpertLayer, checkpoint: Checkpoint, shape: ModelShape) -> ExpertFfn:
    """The FFN of one layer's experts; gate and up may be halves of one part. Raises UnsupportedCheckpoint."""
    parts = {part.name: part for part in layer.parts}
    projections = []
    for name in ("gate", "up", "down"):
        part = parts.get(name) or parts["gate_up"]
        rows, columns = part.shape
        row_bytes = part.expert_bytes // rows
        projection = Projection(part.type_name, rows // 2 if part.name == "gate_up" else rows, columns, row_bytes)
        outside = projection.rows if name == "down" else columns
        if outside != shape.hidden_size or layer.expert_count != shape.expert_count:
            raise UnsupportedCheckpoint(
                f"{checkpoint.files[0]}: the {part.name} of layer {layer.layer} has {layer.expert_count} experts of"
                f" {part.shape}; {shape.expert_count} experts and a hidden size of {shape.hidden_size} are expected"
            )
        projections.append(projection)
    return ExpertFfn(*projections)


def _expert_positions(layer: ExpertLayer, ffn: ExpertFfn, parts: NDArray[np.int64]) -> I64:
    """Where gate, up and down begin in a slot, (experts, 3), from where the parts do, (experts, parts)."""
    if len(layer.parts) == 3:
        return parts
    gate, down = parts[:, 0], parts[:, 1]
    return np.stack([gate, gate + ffn.gate.rows * ffn.gate.row_bytes, down], axis=1)


class _Tensors:
    """Tensors by name, checked against what the model expects; without `resident` only checked."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        resident: ResidentTensors | None,
        place: Callable[[NDArray[np.uint8]], NDArray[np.uint8]],
    ) -> None:
        self._checkpoint = checkpoint
        self._resident = resident
        self._place = place
        self.asked: set[str] = set()

    def matrix(self, name: str, rows: int | None, columns: int) -> QuantMatrix:
        tensor = self._find(name)
        if len(tensor.shape) != 2 or tensor.shape[1] != columns or rows not in (None, tensor.shape[0]):
            raise self._misshaped(tensor, f"({'any' if rows is None else rows}, {columns})")
        row_bytes = tensor.nbytes // tensor.shape[0]
        return QuantMatrix(tensor.type_name, columns, self._array(tensor, np.uint8, (tensor.shape[0], row_bytes)))

    def vector(self, name: str, size: int, *, placed: bool = True) -> F32:
        tensor = self._find(name)
        if tensor.shape != (size,) or tensor.type_name != "F32":
            raise self._misshaped(tensor, f"({size},) F32")
        return self._array(tensor, np.float32, (size,), placed=placed)

    def _find(self, name: str) -> TensorInfo:
        self.asked.add(name)
        if name not in self._checkpoint.tensors:
            raise UnsupportedCheckpoint(f"{self._checkpoint.files[0]}: the tensor {name} is missing")
        return self._checkpoint.tensors[name]

    def _array(
        self, tensor: TensorInfo, kind: type[Any], shape: tuple[int, ...], *, placed: bool = True
    ) -> NDArray[Any]:
        if self._resident is None:
            return np.broadcast_to(kind(0), shape)  # a shape alone, which takes no memory
        data = self._resident[tensor.name]
        found = self._place(data) if placed else data
        if found is not data:
            self._resident.release(tensor.name)
        array: NDArray[Any] = found.view(kind).reshape(shape)
        return array

    def _misshaped(self, tensor: TensorInfo, expected: str) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(
            f"{self._checkpoint.files[tensor.file]}: the tensor {tensor.name} at offset {tensor.offset} is"
            f" {tensor.shape} {tensor.type_name}; {expected} is expected"
        )
