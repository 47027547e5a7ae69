"""Slots in a CUDA device's own memory, filled by copies out of pinned host memory.

This module is the hooks and the options; what a store does is in `store`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from attrs import field, frozen, validators

import expertstream_cuda
from expertstream import (
    Commit,
    DeviceDescription,
    HostSlots,
    SlotBudget,
    SlotLayout,
    SlotStore,
    Staging,
    StoreMemory,
    hookimpl,
)
from expertstream_cuda import Device
from expertstream_cuda_discrete.store import DeviceStore, allocation_bytes

EXPERTSTREAM_CONTRACT = 1

HEADROOM_BYTES = 256 << 20
"""What a budget leaves free at least: CUDA's own allocations grow with the kernels that are loaded. On a large device
it leaves a 64th of its memory."""


@frozen(kw_only=True)
class Options:
    """What the user can set.

    `device` is its number, as CUDA counts them, or its UUID as nvidia-smi shows it. `staging_buffers` is how many
    pinned buffers of a slot's size each store gets; reads from the file land in them, so fewer than the filler has
    threads slow it down.
    """

    device: str = "0"
    staging_buffers: int = field(default=8, validator=[validators.ge(1), validators.le(1024)])


_options = Options()
"""Of the opening that asks now. A store keeps what it was made with."""


@hookimpl
def configure(options: Options) -> None:
    """Count until the core says others, as it does when another opening asks."""
    global _options
    _options = options


@hookimpl
def host_memory_is_device_addressable() -> bool:
    """Never: these stores keep a copy on the device. Opens the device, to say where there is none that can be."""
    _device().open()
    return False


@hookimpl
def budget_for_expert_size(expert_bytes: int, resident_bytes: int, asked: int | None) -> SlotBudget:
    """What the driver has free, less headroom and the resident bytes. Buffers are counted for the default alignment."""
    device = _device()
    free_bytes, total_bytes = device.memory()
    headroom_bytes = max(HEADROOM_BYTES, total_bytes // 64)
    fit = max(free_bytes - headroom_bytes - resident_bytes, 0) // expert_bytes
    slots = fit if asked is None else min(asked, fit)
    return SlotBudget(
        slots,
        f"{slots} slots of {expert_bytes} bytes; {fit} fit beside {resident_bytes} resident bytes: {device.name} has"
        f" {free_bytes} of {total_bytes} bytes free and keeps {headroom_bytes}",
        staging_bytes=allocation_bytes(expert_bytes, _options.staging_buffers),
    )


@hookimpl
def alloc_slot_store(layout: SlotLayout, slot_count: int) -> SlotStore:
    """One device allocation and one pinned one."""
    return DeviceStore(_device(), layout, slot_count, _options.staging_buffers)


@hookimpl
def alloc_host_slots(store: SlotStore, slot_count: int) -> HostSlots:
    """One more pinned allocation."""
    return cast(DeviceStore, store).host_slots(slot_count)


@hookimpl
def measure_store(store: SlotStore) -> StoreMemory:
    """What the driver was asked for."""
    return cast(DeviceStore, store).memory


@hookimpl
def commit_slot(store: SlotStore, staging: Staging) -> Commit:
    """An asynchronous copy and an event after it."""
    return cast(DeviceStore, store).commit(staging)


@hookimpl
def describe_device() -> DeviceDescription:
    """The device's name and memory, as the driver says."""
    return _device().describe()


@hookimpl
def launch_read(store: SlotStore, slot: int, stream: int, after_ms: int) -> Callable[[], bytes]:
    """A kernel that holds the stream, then one that reads the slot."""
    device_store = cast(DeviceStore, store)
    address, slot_bytes = device_store.address(slot), store.layout.slot_bytes
    return expertstream_cuda.launch_read(device_store.device, address, slot_bytes, stream, after_ms)


def _device() -> Device:
    return expertstream_cuda.open_device(_options.device)
