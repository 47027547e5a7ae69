"""A commit of kept bytes whose copy failed counts as one that ended."""

from expertstream import CommitFailed
from expertstream_broken.sound import allocates
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Kept, TieredStore

EXPERTSTREAM_CONTRACT = 1


class Store(TieredStore):
    def commit(self, staging):
        commit = super().commit(staging)
        if isinstance(staging, Kept):
            for name in ("done", "wait", "order_before"):
                setattr(commit, name, self.in_silence(getattr(commit, name)))
        return commit

    def in_silence(self, ask):
        def asked(*arguments):
            try:
                return ask(*arguments)
            except CommitFailed:
                return True

        return asked


alloc_slot_store = allocates(Store)
