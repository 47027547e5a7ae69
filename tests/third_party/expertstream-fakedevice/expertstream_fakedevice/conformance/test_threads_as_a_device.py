"""Promises of this device alone: nothing there is visible early, and any number of staging buffers will do."""

import threading

import pytest

from expertstream import ExpertKey
from expertstream.conformance.experts import SMALL
from expertstream.conformance.slots_under_test import SlotsUnderTest
from expertstream_fakedevice import DeviceStore


@pytest.mark.hook("commit_slot")
def test_a_copy_behind_a_busy_stream_is_not_there_early(open_slots):
    slots = open_slots(SMALL, 2)
    slots.load(0, ExpertKey(1, 0))
    stream_goes_on = threading.Event()
    slots.store.launch(1, stream_goes_on.wait)
    slots.store.mark_read(0, 1)
    commit = slots.commit(0, ExpertKey(1, 1))
    assert not commit.done()
    assert not slots.wrong(0, ExpertKey(1, 0))
    stream_goes_on.set()
    commit.wait()
    assert not slots.wrong(0, ExpertKey(1, 1))


@pytest.mark.hook("alloc_slot_store")
@pytest.mark.parametrize("staging_count", [1, 3])
def test_any_number_of_staging_buffers_will_do(backend, staging_count):
    slots = SlotsUnderTest(backend, DeviceStore(SMALL, 4, staging_count))
    commits = [slots.commit(slot, ExpertKey(2, slot)) for slot in range(4)]
    for commit in commits:
        commit.wait()
    assert [slots.wrong(slot, ExpertKey(2, slot)) for slot in range(4)] == [""] * 4
    slots.store.close()
