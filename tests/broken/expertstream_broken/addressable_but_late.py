"""Host memory is said to be addressable, and yet is copied."""

from expertstream import hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def host_memory_is_device_addressable():
    return True
