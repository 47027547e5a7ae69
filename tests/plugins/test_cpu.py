"""The cpu backend's own promises: slots in place, page-aligned, one mapping, nothing kept twice."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from expertstream import (
    READY,
    Backend,
    DeviceOutOfMemory,
    SlotLayout,
    SlotPart,
    StoreClosed,
    available_memory,
    installed_backends,
    open_backend,
)

LAYOUT = SlotLayout((SlotPart("gate", 0, 8192), SlotPart("down", 8192, 4096)))


@pytest.fixture
def backend() -> Backend:
    return open_backend("cpu")


def test_it_comes_in_through_an_entry_point_like_a_strangers() -> None:
    assert [offer.distribution for offer in installed_backends()["cpu"]] == ["expertstream"]


def test_a_kernel_without_huge_pages_is_no_obstacle(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        """Memory of a kernel that was built without transparent huge pages."""

        def madvise(self, *advice: int) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mmap, "mmap", Mapping)
    store = backend.alloc_slot_store(LAYOUT, 2)
    assert len(store.read_back(1)) == LAYOUT.slot_bytes
    store.close()


def test_the_staging_is_the_slot(backend: Backend) -> None:
    store = backend.alloc_slot_store(LAYOUT, 3)
    staging = store.stage(1)
    staging.view[:] = bytes(range(256)) * (LAYOUT.slot_bytes // 256)
    assert backend.commit_slot(store, staging) is READY
    view = np.from_dlpack(store.device_view(1))  # type: ignore[arg-type]  # the view has DLPack
    assert view.shape == (LAYOUT.slot_bytes,)
    assert view.dtype == np.uint8
    assert view.tobytes() == store.read_back(1) == bytes(range(256)) * (LAYOUT.slot_bytes // 256)
    staging.view[0] = 77  # the lease has ended; that it shows proves that there is no second copy
    assert view[0] == 77
    store.close()


def test_slots_are_page_aligned_and_do_not_overlap(backend: Backend) -> None:
    store = backend.alloc_slot_store(LAYOUT, 5)
    addresses = [np.asarray(store.device_view(slot)).ctypes.data for slot in range(5)]
    assert all(address % mmap.PAGESIZE == 0 for address in addresses)
    assert np.diff(addresses).tolist() == [LAYOUT.slot_bytes] * 4
    store.close()


def test_eight_threads_fill_eight_slots_at_once(backend: Backend) -> None:
    store = backend.alloc_slot_store(LAYOUT, 8)

    def fill(slot: int) -> None:
        for byte in range(30):
            staging = store.stage(slot)
            np.frombuffer(staging.view, np.uint8)[:] = byte + 30 * slot
            backend.commit_slot(store, staging).wait()
            assert set(store.read_back(slot)) == {byte + 30 * slot}

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, range(8)))
    store.close()


def test_an_alignment_above_a_page_is_kept_by_every_slot(backend: Backend) -> None:
    layout = SlotLayout(LAYOUT.parts, alignment=16 * mmap.PAGESIZE)
    store = backend.alloc_slot_store(layout, 3)
    addresses = [np.asarray(store.device_view(slot)).ctypes.data for slot in range(3)]
    assert [address % layout.alignment for address in addresses] == [0, 0, 0]
    assert len(store.stage(2).view) == layout.slot_bytes
    store.close()


@pytest.mark.parametrize("slot", [-1, 3, 99])
def test_a_slot_that_does_not_exist_is_refused(backend: Backend, slot: int) -> None:
    store = backend.alloc_slot_store(LAYOUT, 3)
    for use in (store.stage, store.device_view, store.read_back):
        with pytest.raises(IndexError):
            use(slot)
    store.close()


def test_use_after_close_is_refused_and_closing_twice_is_not(backend: Backend) -> None:
    store = backend.alloc_slot_store(LAYOUT, 3)
    store.close()
    store.close()
    for use in (store.stage, store.device_view, store.read_back):
        with pytest.raises(StoreClosed):
            use(0)


def test_the_budget_never_exceeds_what_was_asked_or_what_is_there(backend: Backend) -> None:
    assert backend.budget_for_expert_size(4096, 0, 10).slots == 10
    assert backend.budget_for_expert_size(4096, 0, 0).slots == 0
    free_bytes = available_memory().bytes
    greedy = backend.budget_for_expert_size(1 << 20, 0, None)
    assert 0 < greedy.slots <= (free_bytes >> 20) * 1.1
    assert backend.budget_for_expert_size(1 << 20, 1 << 60, 10).slots == 0
    assert "bytes" in backend.budget_for_expert_size(1 << 20, 1 << 60, 10).reason


def test_memory_that_cannot_be_had_is_refused_with_both_numbers(backend: Backend) -> None:
    layout = SlotLayout((SlotPart("gate", 0, 1 << 40),))
    with pytest.raises(DeviceOutOfMemory, match=r"1099511627776.*available"):
        backend.alloc_slot_store(layout, 1 << 20)
