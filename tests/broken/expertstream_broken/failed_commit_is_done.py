"""A commit whose copy failed says that it is done."""

from expertstream import CommitFailed
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore, allocates

EXPERTSTREAM_CONTRACT = 1


class Store(LateStore):
    def commit(self, staging):
        commit = super().commit(staging)
        done = commit.done

        def ended():
            try:
                return done()
            except CommitFailed:
                return True

        commit.done = ended
        return commit


alloc_slot_store = allocates(Store)
