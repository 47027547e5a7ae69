"""Slots as a Metal device takes them, on any POSIX machine: page-aligned host memory, wired, read in place.

This module is the hooks and the options. The parts: `store` the slots, `streams` who still reads them, `wiring`
what keeps them in memory, `mlx` the only one that knows MLX.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Literal, cast, get_args

from attrs import Attribute, field, frozen, validators

from expertstream import (
    READY,
    BackendUnavailable,
    Commit,
    DeviceDescription,
    MemoryRequest,
    SlotBudget,
    SlotLayout,
    SlotStore,
    Staging,
    StoreMemory,
    available_memory,
    hookimpl,
)
from expertstream_metal_compat.mlx import DLPACK_TYPE, Mlx, find_mlx
from expertstream_metal_compat.store import WiredStore, Wiring, slot_stride_bytes
from expertstream_metal_compat.wiring import TRIAL_TAKES_MEMORY, wirable

EXPERTSTREAM_CONTRACT = 1

Views = Literal["numpy", "mlx"]


def _is_a_size(instance: object, attribute: Attribute[MemoryRequest], value: MemoryRequest) -> None:
    if value.size_bytes is None:
        raise ValueError(f"{value} is a share of something; {attribute.name} is an amount, such as 8GiB")


@frozen(kw_only=True)
class Options:
    """What the user can set.

    Slots and everything resident take `working_set_percent` of the recommended working set together: the device's
    own figure, or `recommended_working_set`, which goes before it. `wire` keeps slots in memory with mlock: "try"
    wires as many as the system lets it and warns about the rest, "require" grants no more slots than can be wired.
    `views` is what kernels are given: numpy arrays, or MLX arrays of the same bytes.
    """

    working_set_percent: int = field(default=75, validator=[validators.ge(1), validators.le(100)])
    recommended_working_set: MemoryRequest | None = field(default=None, validator=validators.optional(_is_a_size))
    wire: Wiring = field(default="try", validator=validators.in_(get_args(Wiring)))
    views: Views = field(default="numpy", validator=validators.in_(get_args(Views)))


_options = Options()
"""Of the opening that asks now. A store keeps what it was made with."""


@hookimpl
def configure(options: Options) -> None:
    """Count until the core says others, as it does when another opening asks."""
    global _options
    _options = options


@hookimpl
def host_memory_is_device_addressable() -> bool:
    """One memory. Raises BackendUnavailable where MLX views are asked for and cannot be had."""
    if _options.views == "mlx":
        _required_mlx().check_adoption()
    return True


@hookimpl
def budget_for_expert_size(
    expert_bytes: int, resident_bytes: int, asked: int | None, other_slots_bytes: int
) -> SlotBudget:
    """The stated part of the recommended working set less the resident bytes; if required, only what can be wired.

    What can be wired is tried, with as much for the slots of other classes. Where a trial takes memory, for a moment,
    only a budget that depends on it tries.
    """
    stride_bytes = slot_stride_bytes(expert_bytes)
    room_bytes, why = _working_set()
    slots = max(room_bytes - resident_bytes, 0) // stride_bytes
    if asked is not None:
        slots = min(asked, slots)
    reason = f"{slots} slots of {stride_bytes} bytes beside {resident_bytes} resident bytes: {why}"
    required = _options.wire == "require"
    if slots == 0 or _options.wire == "off" or (TRIAL_TAKES_MEMORY and not required):
        return SlotBudget(slots, reason)
    wired, limit = wirable(other_slots_bytes, stride_bytes, slots)
    if wired == slots:
        return SlotBudget(slots, f"{reason}; all of them can be wired")
    could = f"could be wired, beside {other_slots_bytes} bytes of other slots: {limit}"
    if required:
        remedy = 'raise the limit, or set wire = "try"'
        return SlotBudget(wired, f"{wired} of {slots} slots of {stride_bytes} bytes {could}; {remedy}")
    return SlotBudget(slots, f"{reason}; {wired} of them {could}")


@hookimpl
def alloc_slot_store(layout: SlotLayout, slot_count: int) -> SlotStore:
    """One mapping for all slots, wired as far as the system allows."""
    mlx = _required_mlx() if _options.views == "mlx" else None
    return WiredStore(layout, slot_count, wiring=_options.wire, mlx=mlx)


@hookimpl
def commit_slot(store: SlotStore, staging: Staging) -> Commit:
    """The bytes are where kernels read them."""
    return READY


@hookimpl
def measure_store(store: SlotStore) -> StoreMemory:
    """Whole pages, and how many of their bytes are wired."""
    return cast(WiredStore, store).memory


@hookimpl
def describe_device() -> DeviceDescription:
    """The device that MLX names, else the processor; the memory that this process may still take; its views' type."""
    mlx = find_mlx()
    name = mlx.device_name if mlx else platform.processor() or platform.machine()
    dlpack_type = DLPACK_TYPE if _options.views == "mlx" else 1  # numpy's arrays are host memory
    return DeviceDescription(name, mlx.memory_bytes if mlx else None, available_memory().bytes, dlpack_type)


@hookimpl
def launch_read(store: SlotStore, slot: int, stream: int, after_ms: int) -> Callable[[], bytes]:
    """A read by the stream's thread."""
    return cast(WiredStore, store).launch_read(slot, stream, after_ms)


def _working_set() -> tuple[int, str]:
    """The bytes that slots and everything resident may take together, and why."""
    available = available_memory()
    mlx = find_mlx()
    if _options.recommended_working_set is not None:
        recommended_bytes, source = _options.recommended_working_set.resolve(0), "as configured"
    elif mlx is not None:
        recommended_bytes, source = mlx.recommended_working_set_bytes, f"as {mlx.device_name} says"
    else:
        recommended_bytes, source = available.bytes, f"all that is available: {available.reason}"
    percent = _options.working_set_percent
    allowed_bytes = recommended_bytes * percent // 100
    if allowed_bytes > available.bytes:
        return available.bytes, (
            f"{percent} % of a recommended working set of {recommended_bytes} bytes, {source}, are more than the"
            f" {available.bytes} bytes available: {available.reason}"
        )
    return allowed_bytes, f"{percent} % of a recommended working set of {recommended_bytes} bytes, {source}"


def _required_mlx() -> Mlx:
    mlx = find_mlx()
    if mlx is None:
        raise BackendUnavailable(
            'views = "mlx" needs MLX on a machine with Metal, and there is none here; views = "numpy" needs neither'
        )
    return mlx
