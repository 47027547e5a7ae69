"""Tell the routed experts of a checkpoint from its resident tensors, and check that they fit together.

Shared experts, routers and biases are resident whatever their names contain: a routed tensor matches the whole rule.
Source of the names: the tensor names that the gguf package lists (gguf.constants).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from expertstream.checkpoint.index import ExpertLayer, ExpertPart, TensorInfo
from expertstream.errors import CheckpointError, UnsupportedCheckpoint


def split_routed(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, object], files: Sequence[Path]
) -> tuple[tuple[ExpertLayer, ...], dict[str, TensorInfo], int]:
    """The layers with routed experts, ascending; the resident tensors; how many experts a token uses.

    Every range lies inside its file. Raises UnsupportedCheckpoint where nothing is routed, CheckpointError where
    tensors and metadata contradict each other.
    """
    routed: dict[int, dict[str, TensorInfo]] = {}
    resident = {}
    for name, tensor in tensors.items():
        if match := _ROUTED_NAME.fullmatch(name):
            routed.setdefault(int(match[1]), {})[match[2]] = tensor
        else:
            resident[name] = tensor
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(
            f"{files[0]}: general.architecture is {_shown(architecture)}; it must name the model's architecture"
        )
    count_key = f"{architecture}.expert_count"
    if not routed:
        raise UnsupportedCheckpoint(
            f"{files[0]}: no routed experts found, so there is nothing to stream: none of {len(tensors)} tensors has a "
            f"name like blk.N.ffn_gate_exps.weight (or up, down, gate_up), and {count_key} is "
            f"{_shown(metadata.get(count_key))}"
        )
    expert_count = _whole_number(files[0], metadata, count_key)
    layers = tuple(_expert_layer(layer, routed[layer], count_key, expert_count, files) for layer in sorted(routed))
    used_key = f"{architecture}.expert_used_count"
    used = _whole_number(files[0], metadata, used_key)
    if not 1 <= used <= expert_count:
        raise CheckpointError(
            f"{files[0]}: {used_key} is {used}; it must be from 1 to the {expert_count} of {count_key}"
        )
    return layers, resident, used


_ROUTED_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.ffn_(gate|up|down|gate_up)_exps\.weight")


def _expert_layer(
    layer: int, parts: Mapping[str, TensorInfo], count_key: str, expert_count: int, files: Sequence[Path]
) -> ExpertLayer:
    names = _part_names(layer, parts, files)
    for tensor in parts.values():
        if len(tensor.shape) != 3:
            raise CheckpointError(
                f"{files[tensor.file]}: tensor {tensor.name!r} has the shape {tensor.shape}; routed experts have "
                f"(experts, rows, columns)"
            )
        if tensor.shape[0] != expert_count:
            raise CheckpointError(
                f"{files[tensor.file]}: tensor {tensor.name!r} holds {tensor.shape[0]} experts, "
                f"and {count_key} is {expert_count}"
            )
    _check_shapes(parts, files)
    return ExpertLayer(layer, expert_count, tuple(_expert_part(name, parts[name]) for name in names))


def _part_names(layer: int, parts: Mapping[str, TensorInfo], files: Sequence[Path]) -> tuple[str, ...]:
    wanted = ("gate_up", "down") if "gate_up" in parts else ("gate", "up", "down")
    if parts.keys() != set(wanted):
        missing = [f"blk.{layer}.ffn_{name}_exps.weight" for name in wanted if name not in parts]
        raise CheckpointError(
            f"{files[0]}: layer {layer} has the routed parts {', '.join(sorted(parts))}, and needs exactly "
            f"{', '.join(wanted)}; missing: {', '.join(missing) or 'none'}"
        )
    return wanted


def _check_shapes(parts: Mapping[str, TensorInfo], files: Sequence[Path]) -> None:
    # down is (hidden, width); gate and up are (width, hidden), and gate_up is one above the other.
    down = parts["down"]
    _, hidden, width = down.shape
    for name, tensor in parts.items():
        wanted = {"down": (hidden, width), "gate_up": (2 * width, hidden)}.get(name, (width, hidden))
        if tensor.shape[1:] != wanted:
            raise CheckpointError(
                f"{files[tensor.file]}: an expert of tensor {tensor.name!r} has the shape {tensor.shape[1:]}; beside "
                f"{down.name!r} with {down.shape[1:]} it must be {wanted}"
            )


def _expert_part(name: str, tensor: TensorInfo) -> ExpertPart:
    # Exact: rows are whole blocks, so an expert is a whole number of bytes.
    expert_count = tensor.shape[0]
    expert_bytes = tensor.nbytes // expert_count
    offsets = tensor.offset + expert_bytes * np.arange(expert_count, dtype=np.int64)
    file_numbers = np.full(expert_count, tensor.file, np.int32)
    for array in (offsets, file_numbers):
        array.setflags(write=False)
    return ExpertPart(name, tensor.type_name, tensor.shape[1:], expert_bytes, file_numbers, offsets)


def _whole_number(path: Path, metadata: Mapping[str, object], key: str) -> int:
    value = metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{path}: {key} is {_shown(value)}; it must be a whole number")
    return value


def _shown(value: object) -> str:
    return "absent" if value is None else reprlib.repr(value)
