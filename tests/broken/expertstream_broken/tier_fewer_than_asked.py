"""Half the host slots are made in silence. The core's facade refuses that, so the suite never sees them."""

from expertstream import hookimpl
from expertstream_broken.sound_tiered import *  # noqa: F403  # every hook that is not broken here
from expertstream_broken.sound_tiered import Rows

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def alloc_host_slots(store, slot_count):
    return Rows(store, max(slot_count // 2, 1))
