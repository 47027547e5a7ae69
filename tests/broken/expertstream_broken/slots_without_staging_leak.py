"""A store that is refused because it can have no staging keeps the slots that it had got."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1

KEPT = []


class Store(LateStore):
    def __init__(self, layout, slot_count):
        try:
            super().__init__(layout, slot_count)
        except MemoryError:
            KEPT.append(getattr(self, "slots", None))
            raise


alloc_slot_store = allocates(Store)
