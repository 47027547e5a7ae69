"""A launched read sees the slot as it is when its turn comes, and then takes its time."""

import time

from expertstream import hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def launch_read(store, slot, stream, after_ms):
    def read():
        seen = store.read_back(slot)
        time.sleep(after_ms / 1000)
        return seen

    return store.launch(stream, read).result
