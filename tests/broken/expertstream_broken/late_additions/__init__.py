"""The fixtures that let the suite look at streams and failing commits of the late backends."""

from expertstream_fakedevice.conformance import break_next_commit, streams

__all__ = ["break_next_commit", "streams"]
