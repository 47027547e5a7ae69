"""Two sound backends, which the broken ones are made from: one copies late, one is filled in place.

`allocates` makes the hook of a store's class. A broken backend takes over every hook but the one that it breaks.
"""

from types import SimpleNamespace

from expertstream_fakedevice import (
    DeviceStore,
    budget_for_expert_size,
    commit_slot,
    host_memory_is_device_addressable,
    launch_read,
)

from expertstream import READY, DeviceOutOfMemory, Staging, available_memory, hookimpl

__all__ = [
    "alloc_slot_store",
    "budget_for_expert_size",
    "commit_slot",
    "host_memory_is_device_addressable",
    "launch_read",
]

EXPERTSTREAM_CONTRACT = 1


class LateStore(DeviceStore):
    """The stranger's store with copies later still, so that whatever is early shows, and the end of a lease apart."""

    def __init__(self, layout, slot_count, staging_count=2):
        try:
            super().__init__(layout, slot_count, staging_count, copy_s=0.004)
        except MemoryError:
            if staging_count == 1:
                raise
            LateStore.__init__(self, layout, slot_count, staging_count // 2)

    def commit(self, staging):
        event = self.launch("copies", self.copy, staging, self.reads.pop(staging.slot, {}))
        event.add_done_callback(lambda ended: self.end_lease(staging, ended.exception()))
        return SimpleNamespace(
            done=lambda: event.done() and event.result() is None,
            wait=event.result,
            order_before=lambda stream: (event.done() and event.result()) or self.launch(stream, event.exception),
        )

    def end_lease(self, staging, error):
        DeviceStore.discard(self, staging)


class InPlaceStore(DeviceStore):
    """Staging is the slot, lent when the reads of its old bytes have ended."""

    def stage(self, slot):
        view = self.device_view(slot)
        for event in self.reads.pop(slot, {}).values():
            event.result()
        return Staging(slot, view.data)

    def discard(self, staging):
        pass

    def commit(self, staging):
        return READY


def allocates(store_class):
    """The hook alloc_slot_store that makes stores of this class."""

    @hookimpl
    def alloc_slot_store(layout, slot_count):
        try:
            return store_class(layout, slot_count)
        except MemoryError as error:
            asked_bytes = slot_count * layout.slot_bytes
            raise DeviceOutOfMemory(f"{asked_bytes} bytes asked for, {available_memory().bytes} free") from error

    return alloc_slot_store


alloc_slot_store = allocates(LateStore)
