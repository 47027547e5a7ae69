"""Launching a read returns when the read has ended."""

import time

from expertstream import hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def launch_read(store, slot, stream, after_ms):
    seen = store.launch(stream, lambda: time.sleep(after_ms / 1000) or store.read_back(slot)).result()
    return lambda: seen
