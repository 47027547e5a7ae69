"""cuda_discrete where there is a device: budgets, staging, what it refuses, and the conformance suite on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from expertstream import DeviceOutOfMemory, SlotLayout, SlotPart, open_backend
from expertstream.config import BackendOption
from gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

LAYOUT = SlotLayout((SlotPart("gate", 0, 1 << 20), SlotPart("down", 1 << 20, 147_456)))


def option(key: str, value: object) -> tuple[BackendOption, ...]:
    return (BackendOption("cuda_discrete", key, value),)


def test_a_budget_stays_within_the_devices_free_memory() -> None:
    backend = open_backend("cuda_discrete")
    device = backend.describe_device()
    assert device.free_bytes is not None
    budget = backend.budget_for_expert_size(LAYOUT.slot_bytes, 0, None)
    assert 0 < budget.slots * LAYOUT.slot_bytes < device.free_bytes
    assert str(LAYOUT.slot_bytes) in budget.reason


def test_memory_that_cannot_be_had_is_refused_with_numbers_and_given_back() -> None:
    backend = open_backend("cuda_discrete")
    before = backend.describe_device().free_bytes
    with pytest.raises(DeviceOutOfMemory, match=r"need \d+ bytes on .*; \d+ of \d+ are free"):
        backend.alloc_slot_store(LAYOUT, 1_000_000)
    after = backend.describe_device().free_bytes
    assert before is not None
    assert after is not None
    assert after >= before - (1 << 20)  # others use the device too, and free what they had


def test_as_many_leases_as_there_are_buffers_are_out_at_once() -> None:
    store = open_backend("cuda_discrete", options=option("staging_buffers", 3)).alloc_slot_store(LAYOUT, 4)
    leases = [store.stage(slot) for slot in range(3)]
    addresses = [np.frombuffer(lease.view, np.uint8).ctypes.data for lease in leases]
    assert len(set(addresses)) == 3
    assert not any(address % 4096 for address in addresses)
    for lease in leases:
        store.discard(lease)
    store.close()


def test_a_device_that_is_not_there_is_refused_naming_those_that_are() -> None:
    from expertstream import BackendUnavailable

    with pytest.raises(BackendUnavailable, match=r"CUDA device '99' was asked for.*there are: 0 \(.*GPU-"):
        open_backend("cuda_discrete", options=option("device", "99"))


def test_a_device_is_found_by_its_uuid() -> None:
    from expertstream_cuda.device import _devices

    ((device, identity), *_) = _devices()
    backend = open_backend("cuda_discrete", options=option("device", identity))
    assert backend.describe_device().name == device.name


@pytest.mark.parametrize(
    "arguments", [["cuda_discrete"], ["cuda_unified", "--backend-option=cuda_unified.mapped=true"]]
)
def test_the_backend_passes_the_conformance_suite(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "expertstream.conformance", "-q", "--backend", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
