"""Read the header of one GGUF file: metadata, and each tensor's type, shape and byte range.

It never maps the file, never reads tensor data, and checks each count and length against the bytes that remain
before it allocates for them. It knows nothing of shards and experts. Source of the format: the GGUF specification
in the ggml repository (docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import hashlib
import math
import os
import reprlib
import stat
import struct
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import numpy as np
from attrs import field, frozen
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from expertstream.checkpoint.index import FileStamp, TensorInfo
from expertstream.errors import CheckpointError, ReadFailed, UnsupportedCheckpoint


@frozen
class Header:
    """The header of file number `file` of a checkpoint; tensor offsets count from the start of the file.

    `digest` is that of the header's bytes, up to the padding before `data_offset`. The ranges of the tensors neither
    overlap nor leave their alignment, but nothing says yet that the file is long enough: compare `data_end` with
    `file_bytes`.
    """

    path: Path
    file_bytes: int
    metadata: Mapping[str, object] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    alignment: int
    data_offset: int
    digest: bytes
    stamp: FileStamp

    @property
    def data_end(self) -> int:
        """How long the file must be, in bytes, to hold every tensor."""
        return max((tensor.offset + tensor.nbytes for tensor in self.tensors), default=0)


class CutHeader(CheckpointError):
    """The file ends before its header does. Apart from the rest so that a set can report every short shard at once."""


def read_header(path: Path, file: int = 0) -> Header:
    """The header of the GGUF file at `path`, which becomes file number `file` of its checkpoint.

    Strings of the metadata are str; arrays of numbers are read-only numpy arrays of one dimension, arrays of strings
    tuples. Raises CutHeader, UnsupportedCheckpoint (another format, version, byte order or type), CheckpointError
    (damaged), ReadFailed (the storage failed).
    """
    with _open(path) as stream:
        status = os.fstat(stream.fileno())
        file_bytes = status.st_size
        source = _Source(stream, path, file_bytes)
        tensor_count, key_count = _read_preamble(source)
        metadata = _read_metadata(source, key_count)
        alignment = _alignment(path, metadata)
        records = _read_tensor_records(source, tensor_count)
    data_offset = -(-source.offset // alignment) * alignment
    tensors = tuple(_tensor_info(path, file, record, data_offset, alignment) for record in records)
    _check_ranges(path, tensors)
    stamp = FileStamp.of(status)
    return Header(path, file_bytes, metadata, tensors, alignment, data_offset, source.digest(), stamp)


_WINDOW_BYTES = 256 * 1024
"""One read of the file: large enough that calls do not count, small beside anything else in the process."""

_LARGEST_HEADER_BYTES = 256 * 1024**2
"""Several times the largest published vocabulary. It keeps a damaged length in a huge file from being believed."""

_LONGEST_NAME_BYTES = 2**16 - 1
_DEFAULT_ALIGNMENT = 32
_SMALLEST_TENSOR_RECORD_BYTES = 8 + 4 + 4 + 8  # length of the name, dimension count, type, offset
_SMALLEST_KEY_BYTES = 8 + 4 + 1  # length of the key, value type, value
_MOST_DIMENSIONS = 4
_LARGEST_ELEMENT_COUNT = 2**63 - 1

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_TYPE_AND_OFFSET = struct.Struct("<IQ")

# Value types by their numbers in the file.
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

_REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Numbers that ggml once gave to a type and took back (ggml.h), and the names they had."""

_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint, perhaps)"),
    (b"version https://git-lfs", "a Git LFS pointer: the file itself was never downloaded; run `git lfs pull`"),
    (b"<", "a web page: the download fetched an error or a login page"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"lmgg", "a GGML file, the format before GGUF; convert it"),
    (b"fmgg", "a GGML file, the format before GGUF; convert it"),
    (b"tjgg", "a GGML file, the format before GGUF; convert it"),
)


@frozen
class _TensorRecord:
    name: str
    dims: tuple[int, ...]
    type_number: int
    relative_offset: int


class _Source:
    """A header's bytes, in order, through a window on the file; digests what it hands out."""

    def __init__(self, stream: FileIO, path: Path, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self._stream = stream
        self._end = min(file_bytes, _LARGEST_HEADER_BYTES)
        self._window = b""
        self._window_offset = 0
        self._position = 0
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def offset(self) -> int:
        """Where in the file the next byte lies."""
        return self._window_offset + self._position

    def digest(self) -> bytes:
        """The digest of every byte so far; ends the reading."""
        self._digest.update(self._window[: self._position])
        return self._digest.digest()

    def start(self, byte_count: int) -> bytes:
        """Up to `byte_count` bytes from here on, without taking them: fewer where the file ends."""
        available = min(byte_count, self._end - self.offset)
        self._reach(available, "the first bytes")
        return self._window[self._position : self._position + available]

    def take(self, byte_count: int, what: str) -> bytes:
        self._reach(byte_count, what)
        begin = self._position
        self._position += byte_count
        return self._window[begin : self._position]

    def number(self, layout: struct.Struct, what: str) -> int | float:
        self._reach(layout.size, what)
        value: int | float = layout.unpack_from(self._window, self._position)[0]
        self._position += layout.size
        return value

    def count(self, smallest_item_bytes: int, what: str) -> int:
        """The next 64-bit count, of items that the rest of the file has room for."""
        count = self.unsigned(_U64, what)
        self._check_remaining(count * smallest_item_bytes, f"{count} {what}")
        return count

    def unsigned(self, layout: struct.Struct, what: str) -> int:
        return int(self.number(layout, what))

    def string(self, what: str) -> str:
        return self._text(self.unsigned(_U64, what), what)

    def name(self, what: str) -> str:
        """A string that names something, so that messages may quote it whole."""
        byte_count = self.unsigned(_U64, what)
        if byte_count > _LONGEST_NAME_BYTES:
            raise self.damaged(f"{what} is {byte_count} bytes long; GGUF allows {_LONGEST_NAME_BYTES}")
        return self._text(byte_count, what)

    def strings(self, count: int, what: str) -> tuple[str, ...]:
        """`count` strings. Vocabularies come this way, so the loop does no more than it must."""
        texts: list[str] = []
        append, unpack_from = texts.append, _U64.unpack_from
        try:
            while len(texts) < count:
                self._reach(8, what)
                window, position = self._window, self._position
                last_start = len(window) - 8
                while position <= last_start and len(texts) < count:
                    (length,) = unpack_from(window, position)
                    end = position + 8 + length
                    if end > len(window):
                        break
                    append(window[position + 8 : end].decode())
                    position = end
                self._position = position
                if len(texts) < count and position <= last_start:  # the next string is longer than the window's rest
                    append(self.string(f"{what}[{len(texts)}]"))
        except UnicodeDecodeError as error:
            self._position = position
            raise self._not_text(f"{what}[{len(texts)}]", error) from error
        return tuple(texts)

    def damaged(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message} (near byte {self.offset}); the header is damaged")

    def _text(self, byte_count: int, what: str) -> str:
        raw = self.take(byte_count, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._not_text(what, error) from error

    def _not_text(self, what: str, error: UnicodeDecodeError) -> CheckpointError:
        return self.damaged(f"{what} is not UTF-8: {error.reason} in {error.object[:40]!r}")

    def _reach(self, byte_count: int, what: str) -> None:
        """Make the next `byte_count` bytes lie in the window."""
        ahead = len(self._window) - self._position
        if byte_count <= ahead:
            return
        self._check_remaining(byte_count, what)
        wanted = min(max(byte_count, _WINDOW_BYTES), self._end - self.offset) - ahead
        self._digest.update(self._window[: self._position])
        self._window_offset, rest = self.offset, self._window[self._position :]
        self._position = 0
        self._window = rest + self._read(self._window_offset + ahead, wanted)

    def _check_remaining(self, byte_count: int, what: str) -> None:
        if self.offset + byte_count <= self._end:
            return
        if self._end < self.file_bytes:
            raise self.damaged(f"{what} would make the header larger than {_LARGEST_HEADER_BYTES} bytes")
        raise CutHeader(
            f"{self.path}: {what} at byte {self.offset} of the header needs {byte_count} bytes, "
            f"and the file ends at byte {self.file_bytes}, {self.offset + byte_count - self.file_bytes} bytes too early"
        )

    def _read(self, offset: int, byte_count: int) -> bytes:
        pieces, missing = [], byte_count
        while missing:
            try:
                piece = self._stream.read(missing)
            except OSError as error:
                raise ReadFailed(
                    f"{self.path}: reading {missing} bytes of the header at byte {offset} failed: {error.strerror}"
                ) from error
            if not piece:
                raise ReadFailed(
                    f"{self.path}: ended at byte {offset} of {self.file_bytes}: it shrank while it was read"
                )
            pieces.append(piece)
            offset += len(piece)
            missing -= len(piece)
        return b"".join(pieces)


def _open(path: Path) -> FileIO:
    try:
        # A pipe would block the open until somebody writes to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: not a regular file; give a GGUF file or a folder that holds one")
        return FileIO(path, "rb")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error


def _read_preamble(source: _Source) -> tuple[int, int]:
    """Tensor count and key count of a file of a version and byte order that can be read."""
    start = source.start(64)
    if not start:
        raise CutHeader(f"{source.path}: the file is empty")
    if start[:4] != b"GGUF":
        raise UnsupportedCheckpoint(f"{source.path}: not a GGUF file: {_what_it_is(start)}")
    source.take(4, "the magic")
    version = source.unsigned(_U32, "the version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version & 0xFFFF == 0 and swapped:
        # Byte order is written nowhere; a version number is small, so it shows there.
        raise UnsupportedCheckpoint(
            f"{source.path}: a big-endian GGUF file, version {swapped}; only little-endian ones are read; convert it"
        )
    if version not in (2, 3):
        raise UnsupportedCheckpoint(
            f"{source.path}: GGUF version {version}; versions 2 and 3 can be read; convert the file with a current tool"
        )
    tensor_count = source.count(_SMALLEST_TENSOR_RECORD_BYTES, "tensors")
    return tensor_count, source.count(_SMALLEST_KEY_BYTES, "metadata keys")


def _what_it_is(start: bytes) -> str:
    for magic, name in _OTHER_FORMATS:
        if start.lstrip().startswith(magic):
            return name
    if start[8:9] == b"{":
        return "a safetensors file, which this version cannot stream"
    return f"it begins with {start[:8]!r}"


def _read_metadata(source: _Source, key_count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for number in range(key_count):
        key = source.name(f"the name of key {number}")
        if key in metadata:
            raise source.damaged(f"metadata key {key!r} is there twice")
        metadata[key] = _read_value(source, source.unsigned(_U32, f"the type of {key}"), key)
    return metadata


def _read_value(source: _Source, value_type: int, key: str) -> object:
    if (layout := _SCALARS.get(value_type)) is not None:
        return source.number(layout, key)
    if value_type == _STRING:
        return source.string(key)
    if value_type == _BOOL:
        raw = source.take(1, key)[0]
        if raw > 1:
            raise source.damaged(f"{key} is a boolean of value {raw}")
        return bool(raw)
    if value_type == _ARRAY:
        return _read_array(source, key)
    raise source.damaged(f"{key} has value type {value_type}, which is no type of GGUF")


def _read_array(source: _Source, key: str) -> object:
    item_type = source.unsigned(_U32, f"the item type of {key}")
    if item_type == _STRING:
        return source.strings(source.count(8, f"strings of {key}"), key)
    if item_type == _BOOL:
        raw = np.frombuffer(source.take(source.count(1, f"booleans of {key}"), key), np.uint8)
        if raw.size and raw.max() > 1:
            raise source.damaged(f"{key} has a boolean of value {raw.max()}")
        return raw.view(np.bool_)
    if (layout := _SCALARS.get(item_type)) is not None:
        count = source.count(layout.size, f"numbers of {key}")
        return np.frombuffer(source.take(count * layout.size, key), np.dtype(layout.format))
    if item_type == _ARRAY:
        # The format allows it and no known writer does it.
        raise UnsupportedCheckpoint(f"{source.path}: {key} is an array of arrays, which this version does not read")
    raise source.damaged(f"{key} has item type {item_type}, which is no type of GGUF")


def _alignment(path: Path, metadata: Mapping[str, object]) -> int:
    """A power of two from 8 on: the specification wants a multiple of 8, ggml's own reader a power of two."""
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: general.alignment is {reprlib.repr(alignment)}; it must be a power of two, 8 or more"
        )
    return alignment


def _read_tensor_records(source: _Source, tensor_count: int) -> list[_TensorRecord]:
    records: dict[str, _TensorRecord] = {}
    for number in range(tensor_count):
        name = source.name(f"the name of tensor {number}")
        if name in records:
            raise source.damaged(f"tensor {name!r} is there twice")
        what = f"the record of tensor {name!r}"
        dimension_count = source.unsigned(_U32, what)
        if dimension_count > _MOST_DIMENSIONS:
            raise source.damaged(
                f"tensor {name!r} has {dimension_count} dimensions; GGUF has at most {_MOST_DIMENSIONS}"
            )
        dims = struct.unpack(f"<{dimension_count}Q", source.take(8 * dimension_count, what))
        type_number, relative_offset = _TYPE_AND_OFFSET.unpack(source.take(_TYPE_AND_OFFSET.size, what))
        records[name] = _TensorRecord(name, dims, type_number, relative_offset)
    return list(records.values())


def _tensor_info(path: Path, file: int, record: _TensorRecord, data_offset: int, alignment: int) -> TensorInfo:
    where, dims = f"{path}: tensor {record.name!r}", record.dims
    type_name, block_elements, block_bytes = _storage_type(where, record.type_number)
    element_count = math.prod(dims)
    if not 0 < element_count <= _LARGEST_ELEMENT_COUNT:
        problem = "is empty" if element_count == 0 else f"has more than {_LARGEST_ELEMENT_COUNT} elements"
        raise CheckpointError(f"{where} {problem}: its dimensions are {dims}; the header is damaged")
    row_elements = dims[0] if dims else 1
    if row_elements % block_elements:
        raise CheckpointError(
            f"{where} has rows of {row_elements} elements, not a multiple of {type_name}'s block of {block_elements}"
        )
    if record.relative_offset % alignment:
        raise CheckpointError(
            f"{where} begins at byte {record.relative_offset} of the data, not a multiple of general.alignment "
            f"({alignment}); the header is damaged"
        )
    return TensorInfo(
        name=record.name,
        type_name=type_name,
        shape=dims[::-1],
        file=file,
        offset=data_offset + record.relative_offset,
        nbytes=element_count // block_elements * block_bytes,
    )


def _storage_type(where: str, type_number: int) -> tuple[str, int, int]:
    """Name, elements and bytes of a block. An unknown type is refused for every tensor, streamed or not.

    Its size is unknown, so its range could not be checked, and no engine could compute with it.
    """
    if type_number in _REMOVED_TYPES:
        raise UnsupportedCheckpoint(
            f"{where} has type {type_number} ({_REMOVED_TYPES[type_number]}), which ggml removed; quantize it anew"
        )
    try:
        known = GGMLQuantizationType(type_number)
        block_elements, block_bytes = GGML_QUANT_SIZES[known]
    except (ValueError, KeyError):
        raise UnsupportedCheckpoint(
            f"{where} has type {type_number}, unknown to the installed gguf package; a newer one may know it"
        ) from None
    return known.name, block_elements, block_bytes


def _check_ranges(path: Path, tensors: tuple[TensorInfo, ...]) -> None:
    before: TensorInfo | None = None
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if before is not None and tensor.offset < before.offset + before.nbytes:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} begins at byte {tensor.offset}, inside tensor {before.name!r} "
                f"(bytes {before.offset} to {before.offset + before.nbytes}); the header is damaged"
            )
        before = tensor
