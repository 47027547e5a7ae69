"""One store of the backend under test, used as the core uses it, with what its slots must hold."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from expertstream import Backend, Commit, ExpertKey, SlotStore
from expertstream.conformance.experts import difference, expert_bytes

Bytes = NDArray[np.uint8]


@frozen(eq=False)
class SlotsUnderTest:
    """A store with the backend that it came from."""

    backend: Backend
    store: SlotStore

    def commit(self, slot: int, key: ExpertKey) -> Commit:
        """Fill a slot with an expert; the commit may be under way."""
        staging = self.store.stage(slot)
        staging.view[:] = expert_bytes(self.store.layout, key)
        return self.backend.commit_slot(self.store, staging)

    def load(self, slot: int, key: ExpertKey) -> None:
        """Fill a slot with an expert and wait until it is readable."""
        self.commit(slot, key).wait()

    def scribble(self, slot: int) -> None:
        """Lease host bytes for a slot, write rubbish and discard them."""
        staging = self.store.stage(slot)
        staging.view[:] = b"\xe5" * len(staging.view)
        self.store.discard(staging)

    def wrong(self, slot: int, key: ExpertKey) -> str:
        """How a readable slot differs from the expert that it must hold; empty if it does not."""
        return self.wrong_bytes(self.store.read_back(slot), key)

    def wrong_bytes(self, found: bytes, key: ExpertKey) -> str:
        """How bytes read from a slot differ from the expert that they must be; empty if they do not."""
        return difference(self.store.layout, found, expert_bytes(self.store.layout, key))


def host_array(view: object) -> Bytes | None:
    """A store's view as an array of the same memory, None where the host cannot read that."""
    if view.__dlpack_device__()[0] != _HOST_DEVICE_TYPE:  # type: ignore[attr-defined]  # views are typed as object
        return None
    array: Bytes = np.from_dlpack(view)  # type: ignore[arg-type, assignment]  # the same; tests look at its dtype
    return array


_HOST_DEVICE_TYPE = 1
"""Memory that the host reads, as DLPack numbers device types (dlpack.h, DLDeviceType)."""
