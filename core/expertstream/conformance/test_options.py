"""A backend that is opened again, and so configured again, goes on serving the stores that it has."""

from __future__ import annotations

import pytest

from expertstream import Backend, ExpertKey
from expertstream.conformance.experts import SMALL
from expertstream.conformance.plugin import OpenSlots


@pytest.mark.hook("configure")
def test_a_store_outlives_that_the_backend_is_configured_again(backend: Backend, open_slots: OpenSlots) -> None:
    if backend.options is None:
        pytest.skip(f"backend {backend.name!r} has no options")
    before, after = ExpertKey(0, 1), ExpertKey(0, 2)
    slots = open_slots(SMALL, 2)
    slots.load(0, before)
    backend.hooks.configure(options=backend.options)
    slots.load(1, after)
    later = open_slots(SMALL, 1)
    later.load(0, after)
    assert not slots.wrong(0, before)
    assert not slots.wrong(1, after)
    assert not later.wrong(0, after)
