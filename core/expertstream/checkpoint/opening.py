"""Open a checkpoint: join the headers of its files into one index, refusing what does not fit together."""

from __future__ import annotations

import hashlib
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from expertstream.checkpoint.files import find_files
from expertstream.checkpoint.header import CutHeader, Header, read_header
from expertstream.checkpoint.index import Checkpoint, TensorInfo
from expertstream.checkpoint.routed import split_routed
from expertstream.errors import CheckpointError


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The index of the GGUF checkpoint at `path`: a file, any shard of a split set, or the folder that holds either.

    Reads headers only and leaves no file open. In `metadata`, arrays of numbers are read-only numpy arrays of one
    dimension and arrays of strings are tuples; for a split set it is the first shard's. Raises CheckpointError,
    UnsupportedCheckpoint and, where the storage fails, ReadFailed.
    """
    files = find_files(Path(path).absolute())
    headers = _read_headers(files)
    if len(files) > 1:
        _check_set(headers)
    else:
        _check_alone(headers[0])
    metadata = headers[0].metadata
    layers, resident, experts_per_token = split_routed(_join_tensors(headers), metadata, files)
    return Checkpoint(
        files=files,
        metadata=MappingProxyType(metadata),
        tensors=MappingProxyType(resident),
        layers=layers,
        experts_per_token=experts_per_token,
        identity=_identity(headers),
        stamps=tuple(header.stamp for header in headers),
    )


def _read_headers(files: Sequence[Path]) -> list[Header]:
    """The header of each file. Every file that is too short is named in one error: a download broke more than once."""
    headers, short = [], []
    for number, file in enumerate(files):
        try:
            header = read_header(file, number)
        except CutHeader as error:
            short.append(str(error))
            continue
        headers.append(header)
        if header.data_end > header.file_bytes:
            short.append(
                f"{file}: its tensors end at byte {header.data_end} and the file at {header.file_bytes}, "
                f"{header.data_end - header.file_bytes} bytes too early "
                f"(tensors begin at {header.data_offset}, general.alignment is {header.alignment})"
            )
    if short:
        lines = "\n".join(f"  {line}" for line in short)
        raise CheckpointError(
            f"{len(short)} of {len(files)} files shorter than their headers say: an incomplete download, or damaged "
            f"headers; download these again:\n{lines}"
            if len(files) > 1
            else f"the file is shorter than its header says: an incomplete download, or a damaged header; download it "
            f"again:\n{lines}"
        )
    return headers


def _check_alone(header: Header) -> None:
    # A merged set keeps the keys of its shards, with a count of 0.
    count = header.metadata.get("split.count", 0)
    if not isinstance(count, int) or count not in (0, 1):
        raise CheckpointError(
            f"{header.path}: one of several shards (split.count is {reprlib.repr(count)}), but its name does not end "
            f"like -00001-of-00003.gguf, by which the others are found; give the shards their names back"
        )


def _check_set(headers: Sequence[Header]) -> None:
    """Names say which shard of how many a file is; its header must say the same, and all tensors must be there."""
    tensor_count = sum(len(header.tensors) for header in headers)
    for number, header in enumerate(headers):
        for key, wanted in (("split.count", len(headers)), ("split.no", number), ("split.tensors.count", tensor_count)):
            value = header.metadata.get(key)
            if not isinstance(value, int) or value != wanted:
                raise CheckpointError(
                    f"{header.path}: {key} is {'absent' if value is None else reprlib.repr(value)}, and by names and "
                    f"headers of the {len(headers)} shards it must be {wanted}; these files are not one set"
                )


def _join_tensors(headers: Sequence[Header]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{header.path}: tensor {tensor.name!r} is also in {headers[tensors[tensor.name].file].path}; "
                    f"these files are not one set"
                )
            tensors[tensor.name] = tensor
    return tensors


def _identity(headers: Sequence[Header]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for header in headers:
        digest.update(header.digest + header.file_bytes.to_bytes(8, "little"))
    return digest.hexdigest()
