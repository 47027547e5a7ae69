"""The fixtures that let the suite look at streams, failing commits and scarce staging of the late backends."""

from expertstream_fakedevice.conformance import break_next_commit, starve_staging, streams

__all__ = ["break_next_commit", "starve_staging", "streams"]
