"""Experts whose every byte tells layer, expert, part and position, and the layouts of the slots they go into."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from expertstream import IO_ALIGNMENT_BYTES, ExpertKey, SlotLayout, SlotPart


def layout_of_pages(*part_pages: int, alignment: int = IO_ALIGNMENT_BYTES) -> SlotLayout:
    """A layout with a part for each number, which counts units of IO_ALIGNMENT_BYTES."""
    parts, end = [], 0
    for number, pages in enumerate(part_pages):
        parts.append(SlotPart(f"part{number}", end, pages * IO_ALIGNMENT_BYTES))
        end += pages * IO_ALIGNMENT_BYTES
    return SlotLayout(tuple(parts), alignment)


ONE_PAGE = layout_of_pages(1)
SMALL = layout_of_pages(3, 5, 1)
LARGE = layout_of_pages(281, 281, 283)
"""3.3 MiB, of parts above 1 MiB: copies of less than 256 KiB may be complete by luck where larger ones are not."""

LAYOUTS = {"one page": ONE_PAGE, "small": SMALL, "large": LARGE}


@lru_cache(maxsize=24)
def expert_bytes(layout: SlotLayout, key: ExpertKey) -> bytes:
    """All bytes of a slot that holds this expert; no two experts, parts or positions look alike."""
    return b"".join(
        np.random.default_rng([key.layer, key.expert, number]).bytes(part.room_bytes)
        for number, part in enumerate(layout.parts)
    )


def difference(layout: SlotLayout, found: bytes, expected: bytes) -> str:
    """Where two slots' bytes differ, in words for a failing test; empty where they do not."""
    if found == expected:
        return ""
    if len(found) != len(expected):
        return f"{len(found)} bytes instead of {len(expected)}"
    wrong = np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8))
    first = int(wrong[0])
    part = next(part for part in reversed(layout.parts) if part.offset <= first)
    return (
        f"{wrong.size} of {len(found)} bytes are wrong, the first at {first}, {first - part.offset} into {part.name!r}"
    )
