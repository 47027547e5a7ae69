"""One CUDA device, opened by number or UUID, with the questions that a backend asks its driver."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from attrs import field, frozen

from expertstream import BackendUnavailable, CommitFailed, DeviceDescription, MachineError, get_log

DLPACK_TYPE = 2
"""What the arrays of `Device.view` say by DLPack: kDLCUDA. CuPy asks the driver about an address and says so of all but
managed memory, which no store here is made of: of device memory, and of host memory, registered or not."""

_NO_DEVICE, _DRIVER_TOO_OLD = 100, 35  # cudaErrorNoDevice, cudaErrorInsufficientDriver: driver_types.h


@frozen
class Device:
    """A device that the driver counts. Any thread may call; `runtime` is CuPy's binding of the CUDA runtime."""

    number: int
    name: str
    runtime: Any = field(repr=False, eq=False)

    def use(self) -> None:
        """Make it the calling thread's current device, which every thread has its own of. Belongs inside `failing`."""
        self.runtime.setDevice(self.number)

    def open(self) -> None:
        """Make a context on it, or take the one there is. Raises BackendUnavailable where the driver refuses it.

        A device that is counted may be another process's alone, or have no memory left for a context.
        """
        with self.opening():
            self.use()
            self.runtime.memGetInfo()  # before CUDA 12 making a device current makes no context

    def attribute(self, name: str) -> int:
        """The driver's answer to cudaDevAttr`name`. Raises BackendUnavailable where it has none."""
        with self.opening():
            return int(self.runtime.deviceGetAttribute(getattr(self.runtime, f"cudaDevAttr{name}"), self.number))

    def memory(self) -> tuple[int, int]:
        """Bytes free and bytes in all, by the driver. Raises BackendUnavailable where it says what cannot be."""
        with self.failing():
            self.use()
            free_bytes, total_bytes = self.runtime.memGetInfo()
        if not 0 <= free_bytes <= total_bytes:
            raise BackendUnavailable(
                f"CUDA device {self.number} ({self.name}): the driver says that {free_bytes} of {total_bytes} bytes are"
                f" free, which cannot be"
            )
        return free_bytes, total_bytes

    def describe(self) -> DeviceDescription:
        """Its name and memory, for people, with slots that `view` shows. Raises as `memory` does."""
        free_bytes, total_bytes = self.memory()
        return DeviceDescription(self.name, total_bytes, free_bytes, DLPACK_TYPE)

    def view(self, address: int, size_bytes: int, owner: object) -> Any:
        """A CuPy array (size_bytes,) uint8 of memory that kernels read there; it keeps `owner` alive."""
        import cupy  # as everywhere here: when it is needed, see this package's opening lines

        memory = cupy.cuda.UnownedMemory(address, size_bytes, owner, self.number)
        return cupy.ndarray((size_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))

    @contextmanager
    def opening(self) -> Iterator[None]:
        """What the driver raises inside, as BackendUnavailable: there is a device, and this process cannot have it."""
        try:
            yield
        except self.runtime.CUDARuntimeError as error:
            raise BackendUnavailable(
                f"CUDA device {self.number} ({self.name}) is there and cannot be opened: {error}; nvidia-smi shows"
                " which processes have it, and whether its compute mode lets others in: end them, or choose another"
                " device by the option `device`, or another backend"
            ) from error

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What the driver raises inside, as MachineError; after most of its errors the process has lost the device."""
        try:
            yield
        except self.runtime.CUDARuntimeError as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> MachineError:
        """What to raise where the driver raised `error`."""
        return MachineError(f"CUDA device {self.number} ({self.name}): {error}")

    def commit_failed(self, slot: int, error: Exception) -> CommitFailed:
        """What to raise where the driver raised `error` about a slot's copy."""
        return CommitFailed(f"slot {slot} of CUDA device {self.number} ({self.name}): {error}")


@cache
def open_device(which: str) -> Device:
    """The device of that number or UUID, "0" or "GPU-...".

    Raises BackendUnavailable where CuPy, the driver, any device or that device is missing, saying which. The
    driver is asked once in a process, and the log says once which one of several it is: as a warning, because the
    others are not used, whoever chose.
    """
    devices = _devices()
    listed = [f"{device.number} ({device.name}, {identity})" for device, identity in devices]
    for place, (device, identity) in enumerate(devices):
        if which in (str(device.number), identity):
            if len(devices) > 1:
                get_log().warning(
                    "cuda_device_chosen",
                    device=device.number,
                    name=device.name,
                    of=len(devices),
                    unused=", ".join(listed[:place] + listed[place + 1 :]),
                    choose_by="--backend-option BACKEND.device=NUMBER, or =UUID",
                )
            return device
    raise BackendUnavailable(f"CUDA device {which!r} was asked for, by number or UUID; there are: {', '.join(listed)}")


def _devices() -> list[tuple[Device, str]]:
    """Every device with its UUID as nvidia-smi writes it."""
    runtime = _runtime()
    try:
        count = runtime.getDeviceCount()
        if not count:
            raise BackendUnavailable(_no_device())
        return [_device(runtime, number) for number in range(count)]
    except runtime.CUDARuntimeError as error:
        raise BackendUnavailable(_explained(runtime, error)) from error


def _device(runtime: Any, number: int) -> tuple[Device, str]:
    properties = runtime.getDeviceProperties(number)
    name = properties["name"].decode(errors="replace")
    return Device(number, name, runtime), f"GPU-{uuid.UUID(bytes=bytes(properties['uuid']))}"


@cache
def _runtime() -> Any:
    try:
        from cupy.cuda import runtime
    except Exception as error:  # a broken installation may raise anything at import
        raise BackendUnavailable(
            f"CuPy cannot be imported ({type(error).__name__}: {error}); install expertstream[cuda13], or"
            " expertstream[cuda12] for drivers older than 580"
        ) from error
    return runtime


def _explained(runtime: Any, error: Any) -> str:
    if error.status == _NO_DEVICE:
        return _no_device()
    if error.status == _DRIVER_TOO_OLD:
        driver = runtime.driverGetVersion()
        if not driver:
            return "no CUDA driver is installed here"
        return (
            f"the CUDA driver is for CUDA {_version(driver)}, older than CUDA {_version(runtime.runtimeGetVersion())}"
            " that this CuPy is for; update the driver, or install expertstream[cuda12]"
        )
    return f"the CUDA driver answers: {error}"


def _no_device() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "the CUDA driver finds no device" + (f"; CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else "")


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
