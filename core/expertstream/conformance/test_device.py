"""A device says how its memory relates to the host's, and what it is called."""

from __future__ import annotations

import pytest

from expertstream import READY, Backend, ExpertKey
from expertstream.conformance.experts import SMALL
from expertstream.conformance.plugin import OpenSlots


@pytest.mark.hook("host_memory_is_device_addressable")
def test_whether_host_memory_is_addressable_does_not_change(backend: Backend) -> None:
    assert {backend.hooks.host_memory_is_device_addressable() for _ in range(3)} in ({True}, {False})


@pytest.mark.hook("host_memory_is_device_addressable", "commit_slot")
def test_addressable_memory_is_committed_at_once(backend: Backend, open_slots: OpenSlots) -> None:
    if not backend.host_memory_is_device_addressable():
        pytest.skip(f"backend {backend.name!r}: host memory is not device addressable")
    slots = open_slots(SMALL, 3)
    for expert in range(8):
        key = ExpertKey(0, expert)
        assert slots.commit(expert % 3, key) is READY
        assert not slots.wrong(expert % 3, key)


@pytest.mark.hook("describe_device")
def test_a_device_has_a_name_and_no_more_free_memory_than_memory(backend: Backend) -> None:
    device = backend.describe_device()
    assert device.name.strip()
    assert device.memory_bytes is None or device.memory_bytes > 0
    assert device.free_bytes is None or device.free_bytes >= 0
    if device.memory_bytes is not None and device.free_bytes is not None:
        assert device.free_bytes <= device.memory_bytes
