"""Closing returns while copies are under way."""

from expertstream import StoreClosed
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def close(self):
        for stream in self.streams.values():
            stream.shutdown(wait=False)
        self.is_closed = True

    def device_view(self, slot):
        if getattr(self, "is_closed", False):
            raise StoreClosed("this slot store is closed")
        return super().device_view(slot)


alloc_slot_store = allocates(Store)
