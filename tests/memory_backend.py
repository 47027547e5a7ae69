"""A backend of the required hooks alone, in ordinary memory, so that tests of the core need no plugin."""

from __future__ import annotations

import mmap
from importlib import metadata

import numpy as np
import pytest
from numpy.typing import NDArray

from expertstream import READY, Commit, SlotBudget, SlotLayout, SlotStore, Staging, StoreClosed, hookimpl
from expertstream.backends import GROUP

EXPERTSTREAM_CONTRACT = 1

NAME = "memory"


def offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the only backend of the machine, as an entry point would."""
    entry = metadata.EntryPoint(NAME, __name__, GROUP)
    real = metadata.entry_points
    monkeypatch.setattr(
        metadata, "entry_points", lambda **wanted: (entry,) if wanted.get("group") == GROUP else real(**wanted)
    )


class MemoryStore:
    """Slots one after the other in one mapping, filled and read in place."""

    def __init__(self, layout: SlotLayout, slot_count: int) -> None:
        self.layout, self.slot_count, self.is_closed = layout, slot_count, False
        memory = mmap.mmap(-1, max(slot_count, 1) * layout.slot_bytes)
        self._slots = np.frombuffer(memory, np.uint8).reshape(-1, layout.slot_bytes)[:slot_count]

    def stage(self, slot: int) -> Staging:
        return Staging(slot, self.device_view(slot).data)

    def discard(self, staging: Staging) -> None:
        pass

    def mark_read(self, slot: int, stream: int) -> None:
        pass

    def device_view(self, slot: int) -> NDArray[np.uint8]:
        if self.is_closed:
            raise StoreClosed("this store is closed")
        view: NDArray[np.uint8] = self._slots[slot]
        return view

    def read_back(self, slot: int) -> bytes:
        return self.device_view(slot).tobytes()

    def close(self) -> None:
        self.is_closed = True


@hookimpl
def host_memory_is_device_addressable() -> bool:
    return True


@hookimpl
def budget_for_expert_size(asked: int | None) -> SlotBudget:
    return SlotBudget(asked or 0, "memory never runs out in a test")


@hookimpl
def alloc_slot_store(layout: SlotLayout, slot_count: int) -> SlotStore:
    return MemoryStore(layout, slot_count)


@hookimpl
def commit_slot(store: SlotStore, staging: Staging) -> Commit:
    return READY
