"""A limit of slots alone is granted to each size of slot as if there were no other."""

from expertstream import SlotBudget, hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook but those below
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1

LIMIT_BYTES = 256 << 10


class Store(LateStore):
    sizes = {}  # noqa: RUF012  # of every open store, in bytes

    def __init__(self, layout, slot_count):
        size_bytes = slot_count * layout.slot_bytes
        if sum(Store.sizes.values()) + size_bytes > LIMIT_BYTES:
            raise MemoryError
        super().__init__(layout, slot_count)
        Store.sizes[self] = size_bytes

    def close(self):
        super().close()
        Store.sizes.pop(self, None)


@hookimpl
def budget_for_expert_size(expert_bytes, asked):
    room = LIMIT_BYTES // expert_bytes
    return SlotBudget(room if asked is None else min(asked, room), f"{room} slots fit into {LIMIT_BYTES} bytes")


alloc_slot_store = allocates(Store)
