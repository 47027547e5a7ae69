"""What this distribution adds to the conformance suite: its streams, how a copy of it fails, tests of its own."""

import pytest

from expertstream import CommitFailed


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
