"""How a host tier grows by the sizes that it has, where memory for it runs out: counts alone, no bytes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from expertstream import DeviceOutOfMemory
from expertstream.host_tier import HostTier, TierClass

MIB = 1 << 20


class Room:
    """Stands for a backend that has so many bytes for host slots."""

    name = "room"

    def __init__(self, left_bytes: int) -> None:
        self.left_bytes = left_bytes
        self.asked: list[int] = []

    def alloc_host_slots(self, store: Any, slot_count: int) -> SimpleNamespace:
        self.asked.append(slot_count)
        asked_bytes = slot_count * store.layout.slot_bytes
        if asked_bytes > self.left_bytes:
            raise DeviceOutOfMemory(f"{asked_bytes} bytes asked for, {self.left_bytes} left")
        self.left_bytes -= asked_bytes
        return SimpleNamespace(slot_count=slot_count)


def grown(room: Room, *slot_bytes: int, planned: int = 1000) -> HostTier:
    """A tier of one layer for each size, when it has ended to grow."""
    classes: Any = [
        TierClass(SimpleNamespace(layout=SimpleNamespace(slot_bytes=size)), (layer,), planned)  # type: ignore[arg-type]
        for layer, size in enumerate(slot_bytes)
    ]
    backend: Any = room
    tier = HostTier(backend, classes, len(slot_bytes), 1, threading.RLock(), is_exclusive=True)
    tier.grow()
    assert tier._thread is not None
    tier._thread.join()
    assert tier.take_error() is None
    return tier


@pytest.mark.parametrize(
    ("slot_bytes", "asked", "slots"),
    [
        (MIB, [256, 128, 128, 64, 64], 192),
        (5 * MIB // 2, [102, 64, 64], 64),  # half a piece is fewer than the fewest, which still fit
        (16 * MIB // 5, [80, 64, 64], 64),
        (16 * MIB, [16, 8, 8, 4, 4, 2, 1], 12),  # each is worth an allocation
        (120 * MIB, [2, 1, 1], 1),
        (300 * MIB, [1], 0),
    ],
)
def test_what_is_refused_is_halved_down_to_the_fewest(slot_bytes: int, asked: list[int], slots: int) -> None:
    room = Room(205 * MIB)
    tier = grown(room, slot_bytes)
    assert (room.asked, tier.state.slot_count) == (asked, slots)


@pytest.mark.parametrize("planned", [1, 63, 64, 65, 130])
def test_what_is_left_to_grow_is_no_reason_to_give_up_sooner(planned: int) -> None:
    tier = grown(Room(planned * MIB), MIB, planned=planned)
    assert tier.state.slot_count == planned


def test_a_class_whose_growth_ends_leaves_the_room_to_the_others() -> None:
    room = Room(200 * MIB)
    with capture_logs() as events:
        tier = grown(room, 300 * MIB, MIB, planned=150)
    assert room.asked == [1, 150]
    assert tier.state.slot_count == 150
    (said,) = [event for event in events if event["event"] == "host_tier_smaller"]
    assert said["classes"] == "0 of 150 for layer 0; 150 of 150 for layer 1"
    assert said["reason"] == f"{300 * MIB} bytes asked for, {200 * MIB} left"
