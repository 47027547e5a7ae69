"""The pages of a host slot go back to the system after its commit, and are zero when they return."""

from expertstream_broken.sound import allocates
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import TieredStore

EXPERTSTREAM_CONTRACT = 1


class Store(TieredStore):
    def end_lease(self, staging, error):
        super().end_lease(staging, error)
        if row := self.rows.get(id(staging.view)):
            row.memory[:] = 0


alloc_slot_store = allocates(Store)
