"""One store of the backend under test, used as the core uses it, with what its slots must hold."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from expertstream import Backend, Commit, ExpertKey, HostSlots, SlotStore
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
        return self.wrong_bytes(self.store.read_back(slot), key, f"slot {slot}")

    def wrong_bytes(self, found: bytes, key: ExpertKey, what: str = "what was read") -> str:
        """How bytes read from a slot, called `what`, differ from the expert that they must be; empty if they do not."""
        wrong = difference(self.store.layout, found, expert_bytes(self.store.layout, key))
        return f"{what} is not expert {key.expert} of layer {key.layer}: {wrong}" if wrong else ""

    def host_slots(self, slot_count: int) -> HostSlotsUnderTest:
        """So many more host slots of the store."""
        return HostSlotsUnderTest(self, self.backend.alloc_host_slots(self.store, slot_count))


@frozen(eq=False)
class HostSlotsUnderTest:
    """Host slots, with the slots that they are below."""

    slots: SlotsUnderTest
    host_slots: HostSlots

    def commit(self, host_slot: int, slot: int, key: ExpertKey) -> Commit:
        """Fill a host slot with an expert and commit it as a slot; the commit may be under way."""
        staging = self.host_slots.stage(host_slot, slot)
        staging.view[:] = expert_bytes(self.slots.store.layout, key)
        return self.slots.backend.commit_slot(self.slots.store, staging)

    def recommit(self, host_slot: int, slot: int) -> Commit:
        """Commit what a host slot keeps as a slot; the commit may be under way."""
        staging = self.host_slots.restage(host_slot, slot)
        return self.slots.backend.commit_slot(self.slots.store, staging)

    def scribble(self, host_slot: int, slot: int) -> None:
        """Lease a host slot to be filled, write rubbish and discard it."""
        staging = self.host_slots.stage(host_slot, slot)
        staging.view[:] = b"\xe5" * len(staging.view)
        self.slots.store.discard(staging)

    def use(self, call: str, host_slot: int, slot: int) -> None:
        """Call the one of `stage`, `restage` and `keep` that is named."""
        if call == "keep":
            self.host_slots.keep(slot, host_slot)
        else:
            getattr(self.host_slots, call)(host_slot, slot)

    def wrong(self, host_slot: int, slot: int, key: ExpertKey) -> str:
        """How what a host slot keeps, committed as a slot, differs from the expert that it must be; empty if not."""
        self.recommit(host_slot, slot).wait()
        found = self.slots.store.read_back(slot)
        return self.slots.wrong_bytes(found, key, f"slot {slot}, committed from host slot {host_slot},")


def host_array(view: object) -> Bytes | None:
    """A store's view as an array of the same memory, None where the host cannot read that."""
    if view.__dlpack_device__()[0] != _HOST_DEVICE_TYPE:  # type: ignore[attr-defined]  # views are typed as object
        return None
    array: Bytes = np.from_dlpack(view)  # type: ignore[arg-type, assignment]  # the same; tests look at its dtype
    return array


_HOST_DEVICE_TYPE = 1
"""Memory that the host reads, as DLPack numbers device types (dlpack.h, DLDeviceType)."""
