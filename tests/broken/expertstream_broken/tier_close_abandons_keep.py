"""Closing waits for commits and readers, and frees host slots that keep still fills."""

from expertstream_broken.sound import allocates
from expertstream_broken.sound_tiered_both_ways import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered_both_ways import BothWaysStore

EXPERTSTREAM_CONTRACT = 1


class Store(BothWaysStore):
    def close(self):
        if copies_back := self.streams.pop("copies back", None):
            copies_back.shutdown(wait=False)
        super().close()


alloc_slot_store = allocates(Store)
