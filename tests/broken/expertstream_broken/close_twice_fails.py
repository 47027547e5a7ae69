"""Closing a second time is an error."""

from expertstream import StoreClosed
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def close(self):
        if self.slots is None:
            raise StoreClosed("this slot store is closed")
        super().close()


alloc_slot_store = allocates(Store)
