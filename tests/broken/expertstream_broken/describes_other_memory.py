"""Its slots are host memory, and the description says a device's."""

from expertstream import DeviceDescription, hookimpl
from expertstream_broken.sound import *  # noqa: F403  # every hook that is not broken here

EXPERTSTREAM_CONTRACT = 1


@hookimpl
def describe_device():
    return DeviceDescription("a device of threads", dlpack_type=2)
