"""Not broken: the late backend on a device with little memory, which the suite's large stores do not fit in."""

from expertstream import DeviceDescription, SlotBudget, hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook but those below
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1

MEMORY_BYTES = 8 << 20


class Store(LateStore):
    def __init__(self, layout, slot_count):
        if slot_count * layout.slot_bytes > MEMORY_BYTES:
            raise MemoryError
        super().__init__(layout, slot_count)


@hookimpl
def budget_for_expert_size(expert_bytes, resident_bytes, asked):
    room = max(MEMORY_BYTES - resident_bytes, 0) // expert_bytes
    return SlotBudget(room if asked is None else min(asked, room), f"{room} slots fit into {MEMORY_BYTES} bytes")


@hookimpl
def describe_device():
    return DeviceDescription("a small device", MEMORY_BYTES)


alloc_slot_store = allocates(Store)
