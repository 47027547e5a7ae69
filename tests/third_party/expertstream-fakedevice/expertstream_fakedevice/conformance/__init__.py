"""What this distribution adds to the suite: its streams, how a copy fails, how staging runs short, tests of its own."""

import pytest

from expertstream import CommitFailed
from expertstream_fakedevice import DeviceStore


@pytest.fixture
def streams():
    """Any number names a stream of this device."""
    return (1, 2)


@pytest.fixture
def break_next_commit():
    """Call it with a store: the copy that comes next fails there, late as copies are."""

    def break_one(store):
        def fail(staging, reads):
            del store.copy
            raise CommitFailed(f"slot {staging.slot}: this copy was told to fail")

        store.copy = fail

    return break_one


@pytest.fixture
def starve_staging(monkeypatch):
    """Call it with a layout and a count: stores that ask for more staging buffers than that find no memory for them."""
    make = DeviceStore.__init__

    def starve(layout, buffer_count):
        def make_with_less(store, layout, slot_count, staging_count=2, **options):
            make(store, layout, slot_count, min(staging_count, buffer_count), **options)  # the slots can be had
            if staging_count > buffer_count:
                raise MemoryError(f"{staging_count} staging buffers asked for, and room for {buffer_count}")

        monkeypatch.setattr(DeviceStore, "__init__", make_with_less)

    return starve
