"""A stream is ordered after a commit that has failed, as if its bytes were there."""

from contextlib import suppress

from expertstream import CommitFailed
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def commit(self, staging):
        commit = super().commit(staging)

        def until_it_is_over():
            with suppress(CommitFailed):
                commit.wait()

        commit.order_before = lambda stream: self.launch(stream, until_it_is_over)
        return commit


alloc_slot_store = allocates(Store)
