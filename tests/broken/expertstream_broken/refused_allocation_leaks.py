"""An allocation that is refused has started a thread, which stays."""

import threading

from expertstream import DeviceOutOfMemory, hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound import LateStore

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def alloc_slot_store(layout, slot_count):
    ended = threading.Event()
    threading.Thread(target=ended.wait, daemon=True).start()
    try:
        store = LateStore(layout, slot_count)
    except MemoryError as error:
        raise DeviceOutOfMemory(f"{slot_count * layout.slot_bytes} bytes asked for, 0 free") from error
    ended.set()
    return store
