"""What a checkpoint holds and where: the index that planner, filler and engine share.

It owns names, types and byte ranges; it never holds a tensor's bytes. Readers of file formats make it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from expertstream.errors import CheckpointError


@frozen
class TensorInfo:
    """A tensor as the file has it: `nbytes` at `offset` of file number `file` of the checkpoint.

    `shape` is in numpy order, slowest first, in elements; `type_name` is the format's own name ("Q4_K").
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


@frozen(eq=False)
class ExpertPart:
    """One projection of every routed expert of one layer.

    `name` is "gate", "up", "down" or "gate_up". `shape` is one expert's, in numpy order (rows, columns).
    `files` (int32) and `offsets` (int64, bytes from the file's start) have one entry an expert.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    expert_bytes: int = field(validator=validators.gt(0))
    files: NDArray[np.int32] = field(repr=False)
    offsets: NDArray[np.int64] = field(repr=False)


@frozen(eq=False)
class ExpertLayer:
    """The routed experts of block `layer` of the model: parts in the order gate, up, down or gate_up, down."""

    layer: int
    expert_count: int
    parts: tuple[ExpertPart, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of this layer in the file, without padding."""
        return sum(part.expert_bytes for part in self.parts)


@frozen
class FileStamp:
    """What tells a file from the one that was indexed, without reading it."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """The stamp of a file whose status is this."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@frozen(eq=False)
class Checkpoint:
    """The index of a model's files. Immutable, holds no file open, safe from any thread.

    `metadata` is the format's own (str to int, float, bool, str or a sequence of them). `tensors` are the resident ones
    by name; `layers` those that have routed experts, ascending. `identity` names the exact model: equal for
    equal headers (of every shard), however the checkpoint was opened. `stamps` are of the files when they were read.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, object] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    layers: tuple[ExpertLayer, ...] = field(repr=False)
    experts_per_token: int
    identity: str
    stamps: tuple[FileStamp, ...] = field(repr=False)

    def refuse_changed(self) -> None:
        """Raise CheckpointError if a file is no longer the one whose header was read: its offsets may be another's.

        To be called after the files have been opened for reading.
        """
        for path, stamp in zip(self.files, self.stamps, strict=True):
            try:
                found = FileStamp.of(path.stat())
            except OSError as error:
                raise CheckpointError(f"{path}: it has gone since its header was read: {error.strerror}") from error
            if found != stamp:
                raise CheckpointError(
                    f"{path}: it was replaced or written to since its header was read ({stamp.size_bytes} bytes then,"
                    f" {found.size_bytes} now): open the model again when nothing writes to it"
                )

    def refuse_written(self, file: int) -> None:
        """Raise CheckpointError if file number `file` was written to, where it lies, since its header was read.

        To be called after a read and before its bytes are used. A file that was removed, or replaced by another, is
        none of these: whoever has it open still reads the one that was indexed. Safe from any thread; may block.
        """
        path, stamp = self.files[file], self.stamps[file]
        try:
            found = FileStamp.of(os.stat(path))
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(
                f"{path}: whether it was written to since its header was read cannot be told: {error.strerror}"
            ) from error
        if found != stamp and (found.device, found.inode) == (stamp.device, stamp.inode):
            raise CheckpointError(
                f"{path}: it was written to since its header was read ({stamp.size_bytes} bytes modified at"
                f" {stamp.modified_ns} ns then, {found.size_bytes} at {found.modified_ns} ns now), so old and new bytes"
                " would be mixed: open the model again when nothing writes to it"
            )

    @property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts in the files, without padding."""
        return sum(layer.expert_bytes * layer.expert_count for layer in self.layers)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all other tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())
