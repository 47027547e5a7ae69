"""What the core does where a backend leaves an optional hook out."""

from __future__ import annotations

from collections.abc import Sequence

from expertstream.hookspecs import hookimpl
from expertstream.slots import DeviceDescription, ExpertKey, SlotStore, StoreMemory


@hookimpl
def seed_experts(hottest: Sequence[ExpertKey], slot_count: int) -> Sequence[ExpertKey]:
    """The hottest that fit."""
    return hottest[:slot_count]


@hookimpl
def describe_device() -> DeviceDescription:
    """A device that its backend does not describe, with slots in host memory."""
    return DeviceDescription("not described by its backend")


@hookimpl
def measure_store(store: SlotStore) -> StoreMemory:
    """What the slots' sizes come to."""
    return StoreMemory(store.slot_count * store.layout.slot_bytes, 0)
