"""Slots in host memory that a CUDA device's kernels read in place: one pool of memory, no copies.

This module is the hooks and the options; `store` is the memory. Whether the device can is the driver's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from attrs import frozen

import expertstream_cuda
from expertstream import (
    READY,
    AvailableMemory,
    BackendUnavailable,
    Commit,
    DeviceDescription,
    SlotBudget,
    SlotLayout,
    SlotStore,
    Staging,
    StoreMemory,
    available_memory,
    get_log,
    hookimpl,
)
from expertstream_cuda import Device
from expertstream_cuda_unified.store import HostStore

EXPERTSTREAM_CONTRACT = 1

HEADROOM_PERCENT = 5
"""What a budget leaves of the available memory: whoever takes too much of one pool is killed, not refused."""

_ADDRESSABLE = ("PageableMemoryAccess", "PageableMemoryAccessUsesHostPageTables")
_MAPPABLE = ("UnifiedAddressing", "HostRegisterSupported", "CanUseHostPointerForRegisteredMem")

_COST = (
    "every use of an expert moves all its bytes across the bus, tens of GB/s where device memory gives thousands:"
    " 47 to 54 GB/s in copies across it against 4200 in reads of device memory on the one machine measured, an H200"
)
"""Of mapped = true. The figures are those of bench/results/gpu-h200.md."""


@frozen(kw_only=True)
class Options:
    """What the user can set.

    `device` is its number, as CUDA counts them, or its UUID as nvidia-smi shows it. With `mapped` a device that cannot
    read host memory as it is reads slots that were registered with it, across the bus, at the bus's speed.
    """

    device: str = "0"
    mapped: bool = False


_options = Options()
"""Of the opening that asks now. A store keeps what it was made with."""


@hookimpl
def configure(options: Options) -> None:
    """Count until the core says others, as it does when another opening asks."""
    global _options
    _options = options


@hookimpl
def host_memory_is_device_addressable() -> bool:
    """True, or BackendUnavailable naming the driver's attribute that says no, or why the device cannot be opened."""
    device = _device()
    needed = _MAPPABLE if _options.mapped else _ADDRESSABLE
    lacking = [name for name in needed if not device.attribute(name)]
    if lacking:
        remedy = "" if _options.mapped else "; mapped = true reads registered host memory across the bus instead"
        raise BackendUnavailable(
            f"{device.name} cannot read host memory in place: the driver's {_named(lacking)} 0{remedy}"
        )
    device.open()
    if _options.mapped:
        get_log().warning("slots_read_across_the_bus", device=device.name, cost=_COST, instead="cuda_discrete")
    return True


@hookimpl
def budget_for_expert_size(
    expert_bytes: int, resident_bytes: int, asked: int | None, other_slots_bytes: int
) -> SlotBudget:
    """What is available to both, less headroom and the resident bytes.

    Where host memory is mapped only the slots are in it: what lies beside them must find room on the device.
    """
    if _options.mapped:
        beside_bytes, (free_bytes, _) = resident_bytes - other_slots_bytes, _device().memory()
        if beside_bytes > free_bytes:
            return SlotBudget(
                0,
                f"with mapped = true {_device().name} holds what lies beside the slots, {beside_bytes} bytes, and has"
                f" {free_bytes} free",
            )
    return one_pool_budget(available_memory(), expert_bytes, resident_bytes, asked)


@hookimpl
def alloc_slot_store(layout: SlotLayout, slot_count: int) -> SlotStore:
    """One mapping for all slots."""
    return HostStore(_device(), layout, slot_count, registered=_options.mapped)


@hookimpl
def measure_store(store: SlotStore) -> StoreMemory:
    """The mapping, and that it is pinned where it is registered."""
    return cast(HostStore, store).memory


@hookimpl
def commit_slot(store: SlotStore, staging: Staging) -> Commit:
    """The bytes are where kernels read them."""
    return READY


@hookimpl
def describe_device() -> DeviceDescription:
    """The device's name; its memory is the machine's. Views of it are the device's all the same, `mapped` or not."""
    return DeviceDescription(_device().name, None, available_memory().bytes, expertstream_cuda.DLPACK_TYPE)


@hookimpl
def launch_read(store: SlotStore, slot: int, stream: int, after_ms: int) -> Callable[[], bytes]:
    """A kernel that holds the stream, then one that reads the slot."""
    host_store = cast(HostStore, store)
    address, slot_bytes = host_store.address(slot), store.layout.slot_bytes
    return expertstream_cuda.launch_read(host_store.device, address, slot_bytes, stream, after_ms)


def one_pool_budget(
    available: AvailableMemory, expert_bytes: int, resident_bytes: int, asked: int | None
) -> SlotBudget:
    """The budget out of one pool of which `available` is left. Pure and in exact integers."""
    headroom_bytes = available.bytes * HEADROOM_PERCENT // 100
    fit = max(available.bytes - headroom_bytes - resident_bytes, 0) // expert_bytes
    slots = fit if asked is None else min(asked, fit)
    return SlotBudget(
        slots,
        f"{slots} slots of {expert_bytes} bytes; {fit} fit beside {resident_bytes} resident bytes, with"
        f" {headroom_bytes} bytes left free because host and device share them: {available.reason}",
    )


def _named(attributes: Sequence[str]) -> str:
    """As the subject of a sentence: "attribute A is", "attributes A, B and C are"."""
    if len(attributes) == 1:
        return f"attribute {attributes[0]} is"
    return f"attributes {', '.join(attributes[:-1])} and {attributes[-1]} are"


def _device() -> Device:
    return expertstream_cuda.open_device(_options.device)
