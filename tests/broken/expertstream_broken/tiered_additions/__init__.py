"""The fixtures of the late backends, for those that have host slots: these run short as staging does."""

import pytest
from expertstream_fakedevice.conformance import break_next_commit, streams
from expertstream_fakedevice.conformance import starve_staging as starve_buffers

from expertstream_broken.sound_tiered import Rows

__all__ = ["break_next_commit", "starve_buffers", "starve_staging", "streams"]


@pytest.fixture
def starve_staging(starve_buffers, monkeypatch):
    """Call it with a layout and a count: more buffers or host slots than that at once find no memory."""
    allocated = Rows.allocated

    def starve(layout, buffer_count):
        starve_buffers(layout, buffer_count)

        def allocated_with_less(rows, slot_count):
            if slot_count > buffer_count:
                raise MemoryError(f"{slot_count} host slots asked for, and room for {buffer_count}")
            return allocated(rows, slot_count)

        monkeypatch.setattr(Rows, "allocated", allocated_with_less)

    return starve
