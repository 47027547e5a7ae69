"""Checkpoint files for tests, written from scratch with struct: the oracle of every reader of them.

It shares no code with the package. Routed bytes are telling: each depends on layer, expert, part and position.
Layout of the format: the GGUF specification in the ggml repository (docs/gguf.md).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attrs import field, frozen

TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ2_XXS": (16, 256, 66),
    "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17),
}
"""Type name to its number in the file, weights of a block, bytes of a block."""

MIXED_LAYERS = (
    *[{"gate": "IQ2_XXS", "up": "IQ2_XXS", "down": "Q2_K"}] * 3,
    {"gate": "Q4_K", "up": "Q4_K", "down": "Q4_K"},
)
"""Four layers in two size classes: 55,296 bytes an expert in layers 0 to 2 and 110,592 in layer 3."""

ARCHITECTURE = "testmoe"

Fill = Callable[[int, int, str, int], bytes]


def telling_bytes(layer: int, expert: int, part: str, nbytes: int) -> bytes:
    """`nbytes` that no other layer, expert, part or position has."""
    return hashlib.shake_128(f"{layer}/{expert}/{part}".encode()).digest(nbytes)


def nbytes_of(type_name: str, *shape: int) -> int:
    """Bytes of a tensor of `shape` in `type_name`."""
    _, block_weights, block_bytes = TYPES[type_name]
    return math.prod(shape) // block_weights * block_bytes


@frozen
class Written:
    """A checkpoint on disk and what it must say: `places` is tensor name to file number, offset and length."""

    files: tuple[Path, ...]
    expert_count: int
    parts: Mapping[tuple[int, str], int]
    """(layer, part) to the bytes of one expert of it."""
    places: Mapping[str, tuple[int, int, int]] = field(repr=False)
    fill: Fill = field(repr=False)

    @property
    def path(self) -> Path:
        """The file to open: the only one, or the first shard."""
        return self.files[0]

    def part_bytes(self, layer: int, expert: int, part: str) -> bytes:
        """What the file holds for one projection of one routed expert."""
        return self.fill(layer, expert, part, self.parts[layer, part])

    def expert_bytes(self, layer: int, expert: int) -> bytes:
        """All parts of one routed expert, one after the other in the order of the layer's parts."""
        return b"".join(self.part_bytes(layer, expert, part) for number, part in self.parts if number == layer)


@frozen
class Tensor:
    """A tensor to write: `dims` in the file's order, fastest first.

    `type_number` and `offset` (from the start of the tensor data) replace what would be right.
    """

    name: str
    type_name: str
    dims: tuple[int, ...]
    data: bytes = field(repr=False)
    type_number: int | None = None
    offset: int | None = None


def write_checkpoint(
    path: Path,
    layers: Sequence[Mapping[str, str]] = MIXED_LAYERS,
    expert_count: int = 8,
    top_k: int = 2,
    hidden: int = 256,
    width: int = 256,
    shards: int = 1,
    alignment: int = 32,
    fill: Fill = telling_bytes,
    metadata: Mapping[str, object] | None = None,
    more_tensors: Sequence[Tensor] = (),
) -> Written:
    """Write a small checkpoint at `path`, or beside it as `<stem>-00001-of-0000N.gguf` when there are shards.

    A layer maps its parts ("gate", "up", "down" or "gate_up", "down") to their types; an empty one is dense. `metadata`
    adds keys to the usual ones, replaces them, or removes them (None). An expert is `width` x `hidden`, its down part
    `hidden` x `width`, in elements. Experts in Q4_K of the default size are whole pages, those in other types are not.
    """
    tensors, parts = _model_tensors(layers, expert_count, hidden, width, fill)
    tensors += more_tensors
    keys: dict[str, object] = {
        "general.architecture": ARCHITECTURE,
        f"{ARCHITECTURE}.block_count": len(layers),
        f"{ARCHITECTURE}.embedding_length": hidden,
        f"{ARCHITECTURE}.expert_count": expert_count,
        f"{ARCHITECTURE}.expert_used_count": top_k,
        **({"general.alignment": alignment} if alignment != 32 else {}),
        **(metadata or {}),
    }
    keys = {key: value for key, value in keys.items() if value is not None}
    files, places = [], {}
    for number in range(shards):
        begin, end = (len(tensors) * edge // shards for edge in (number, number + 1))
        shard_keys, file = keys, path
        if shards > 1:
            split = {"split.no": U16(number), "split.count": U16(shards), "split.tensors.count": I32(len(tensors))}
            shard_keys = {**(keys if number == 0 else {}), **split}
            if alignment != 32:
                shard_keys["general.alignment"] = alignment
            file = path.with_name(f"{path.stem}-{number + 1:05}-of-{shards:05}.gguf")
        header, offsets = gguf_header(shard_keys, tensors[begin:end], alignment=alignment)
        with file.open("wb") as stream:
            stream.write(header)
            for tensor, offset in zip(tensors[begin:end], offsets, strict=True):
                stream.seek(offset)
                stream.write(tensor.data)
                places[tensor.name] = (number, offset, len(tensor.data))
        files.append(file)
    return Written(tuple(files), expert_count, parts, places, fill)


class U8(int):
    """An integer to be written as uint8."""


class U16(int):
    """An integer to be written as uint16."""


class I32(int):
    """An integer to be written as int32; a plain int is uint32."""


class U64(int):
    """An integer to be written as uint64."""


def gguf_header(
    metadata: Mapping[str, object] | Sequence[tuple[str, object]],
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    order: str = "<",
) -> tuple[bytes, list[int]]:
    """A file's bytes up to its tensor data, and where in the file each tensor begins.

    Values: bool, int (uint32) or one of the integer classes above, float (float32), str, a list of one of them, or
    (type number, raw bytes) to be written as it is. `order` is struct's: ">" writes a big-endian file.
    """
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    out = b"GGUF" + struct.pack(f"{order}IQQ", version, len(tensors), len(pairs))
    for key, value in pairs:
        number, raw = _value(value, order)
        out += _string(key, order) + struct.pack(f"{order}I", number) + raw
    relative, end = [], 0
    for tensor in tensors:
        relative.append(end if tensor.offset is None else tensor.offset)
        end = _round_up(relative[-1] + len(tensor.data), alignment)
        type_number = TYPES[tensor.type_name][0] if tensor.type_number is None else tensor.type_number
        out += _string(tensor.name, order) + struct.pack(f"{order}I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        out += struct.pack(f"{order}IQ", type_number, relative[-1])
    out += bytes(_round_up(len(out), alignment) - len(out))
    return out, [len(out) + offset for offset in relative]


def resident(name: str, type_name: str, *dims: int) -> Tensor:
    """A tensor whose bytes depend on its name and their position."""
    return Tensor(name, type_name, dims, hashlib.shake_128(name.encode()).digest(nbytes_of(type_name, *dims)))


def _model_tensors(
    layers: Sequence[Mapping[str, str]], expert_count: int, hidden: int, width: int, fill: Fill
) -> tuple[list[Tensor], dict[tuple[int, str], int]]:
    tensors, parts = (
        [resident("token_embd.weight", "F16", hidden, 32), resident("output_norm.weight", "F32", hidden)],
        {},
    )
    for layer, part_types in enumerate(layers):
        tensors.append(resident(f"blk.{layer}.attn_norm.weight", "F32", hidden))
        if not part_types:
            tensors.append(resident(f"blk.{layer}.ffn_up.weight", "F16", hidden, width))
            continue
        tensors.append(resident(f"blk.{layer}.ffn_gate_inp.weight", "F32", hidden, expert_count))
        for part, type_name in part_types.items():
            columns, rows = {"down": (width, hidden), "gate_up": (hidden, 2 * width)}.get(part, (hidden, width))
            part_bytes = parts[layer, part] = nbytes_of(type_name, rows, columns)
            data = b"".join(fill(layer, expert, part, part_bytes) for expert in range(expert_count))
            tensors.append(
                Tensor(f"blk.{layer}.ffn_{part}_exps.weight", type_name, (columns, rows, expert_count), data)
            )
    return tensors, parts


def _value(value: object, order: str) -> tuple[int, bytes]:
    match value:
        case (int(number), bytes(raw)):
            return number, raw
        case bool():
            return 7, bytes([value])
        case U8():
            return 0, bytes([value])
        case U16():
            return 2, struct.pack(f"{order}H", value)
        case I32():
            return 5, struct.pack(f"{order}i", value)
        case U64():
            return 10, struct.pack(f"{order}Q", value)
        case int():
            return 4, struct.pack(f"{order}I", value)
        case float():
            return 6, struct.pack(f"{order}f", value)
        case str():
            return 8, _string(value, order)
        case list():
            items = [_value(item, order) for item in value]
            return 9, struct.pack(f"{order}IQ", items[0][0] if items else 4, len(items)) + b"".join(
                raw for _, raw in items
            )
    raise TypeError(f"no way to write {value!r}")


def _string(text: str, order: str) -> bytes:
    raw = text.encode()
    return struct.pack(f"{order}Q", len(raw)) + raw


def _round_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
