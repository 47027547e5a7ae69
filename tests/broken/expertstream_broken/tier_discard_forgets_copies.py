"""A discard ends the copies of a host slot as well as its lease, as far as the next lease knows."""

from expertstream_broken.sound import allocates
from expertstream_broken.sound_tiered_both_ways import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered_both_ways import BothWaysStore

EXPERTSTREAM_CONTRACT = 1


class Store(BothWaysStore):
    def discard(self, staging):
        if row := self.rows.get(id(staging.view)):
            row.wait_for_copy = lambda: None
        super().discard(staging)


alloc_slot_store = allocates(Store)
