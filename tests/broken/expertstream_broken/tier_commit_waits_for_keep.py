"""The host waits in a commit for what is on its way into the host slot."""

from expertstream_broken.sound import allocates
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import TieredStore

EXPERTSTREAM_CONTRACT = 1


class Store(TieredStore):
    def commit(self, staging):
        if row := self.rows.get(id(staging.view)):
            row.wait_for_copy()
        return super().commit(staging)


alloc_slot_store = allocates(Store)
