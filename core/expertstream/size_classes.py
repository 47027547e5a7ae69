"""Group the layers of a checkpoint by the size of their experts, and lay out a slot for each group.

Published files mix quantizations by layer and by projection, so experts of one model differ in size. Each
size class gets a store of its own, whose slots fit its experts exactly but for the rounding of direct reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from attrs import frozen

from expertstream.checkpoint.index import Checkpoint, ExpertLayer
from expertstream.slots import IO_ALIGNMENT_BYTES, SlotLayout, SlotPart


@frozen
class SizeClass:
    """Layers whose experts have equal part names and part sizes, and the slot that fits any of them.

    `layers` are block numbers, ascending; `expert_count` counts the experts of all of them.
    """

    layers: tuple[int, ...]
    layout: SlotLayout
    expert_bytes: int
    expert_count: int


def size_classes(checkpoint: Checkpoint) -> tuple[SizeClass, ...]:
    """The size classes of a checkpoint, in order of their first layer."""
    groups: dict[tuple[tuple[str, int], ...], list[ExpertLayer]] = {}
    for layer in checkpoint.layers:
        groups.setdefault(tuple((part.name, part.expert_bytes) for part in layer.parts), []).append(layer)
    return tuple(_size_class(group) for group in groups.values())


def name_layers(layers: Sequence[int]) -> str:
    """Layers in words, runs of ascending block numbers joined: "layers 0-2, 5"."""
    runs = [
        [layer for _, layer in run]
        for _, run in groupby(enumerate(layers), key=lambda numbered: numbered[1] - numbered[0])
    ]
    named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {named}"


def part_shift(
    offsets: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """How far from the start of its room a part's first byte lies, in bytes, for each file offset (int64)."""
    return offsets % IO_ALIGNMENT_BYTES


def _size_class(layers: list[ExpertLayer]) -> SizeClass:
    parts, end = [], 0
    for number, first in enumerate(layers[0].parts):
        worst_shift = max(int(part_shift(layer.parts[number].offsets).max()) for layer in layers)
        room = -(-(worst_shift + first.expert_bytes) // IO_ALIGNMENT_BYTES) * IO_ALIGNMENT_BYTES
        parts.append(SlotPart(first.name, end, room))
        end += room
    return SizeClass(
        layers=tuple(layer.layer for layer in layers),
        layout=SlotLayout(tuple(parts)),
        expert_bytes=layers[0].expert_bytes,
        expert_count=sum(layer.expert_count for layer in layers),
    )
