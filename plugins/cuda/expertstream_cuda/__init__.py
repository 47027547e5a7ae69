"""What the CUDA backends share: one device opened through CuPy, or the reason why it cannot be.

CuPy is imported when a device is opened and not before, so that a machine without it, without a driver or without
a GPU can list its backends and run another one. It allocates nothing that slots live in.
"""

from expertstream_cuda.device import DLPACK_TYPE, Device, open_device
from expertstream_cuda.reading import launch_read, read_back

__all__ = ["DLPACK_TYPE", "Device", "launch_read", "open_device", "read_back"]
