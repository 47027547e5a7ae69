"""The fixture for the streams of the backends that are filled in place; no commit of theirs can fail."""

from expertstream_fakedevice.conformance import streams

__all__ = ["streams"]
