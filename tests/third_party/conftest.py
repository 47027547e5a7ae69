"""Tests in here belong to distributions of their own: the conformance suite collects them, and this run does not."""

collect_ignore = ["expertstream-fakedevice"]
