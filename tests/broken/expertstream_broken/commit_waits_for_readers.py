"""The host waits in commit_slot for the kernels that read the slot's old bytes."""

from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def commit(self, staging):
        for event in self.reads.get(staging.slot, {}).values():
            event.result()
        return super().commit(staging)


alloc_slot_store = allocates(Store)
