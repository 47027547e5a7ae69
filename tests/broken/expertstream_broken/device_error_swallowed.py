"""A copy that failed counts as one that ended."""

from contextlib import suppress

from expertstream import CommitFailed
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def commit(self, staging):
        commit = super().commit(staging)
        wait = commit.wait

        def wait_in_silence():
            with suppress(CommitFailed):
                wait()

        commit.wait = wait_in_silence
        return commit


alloc_slot_store = allocates(Store)
