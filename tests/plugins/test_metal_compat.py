"""The metal_compat backend's own promises: whole pages, wired as far as they can be, refilled after the last read."""

from __future__ import annotations

import json
import mmap
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import structlog

import expertstream_metal_compat
from expertstream import (
    AvailableMemory,
    Backend,
    BackendUnavailable,
    ConfigError,
    DeviceOutOfMemory,
    SlotLayout,
    SlotPart,
    open_backend,
    probe_backends,
)
from expertstream.config import BackendOption
from expertstream_metal_compat import store as store_module
from expertstream_metal_compat import wiring
from expertstream_metal_compat.store import WiredStore
from expertstream_metal_compat.streams import Streams
from lock_limits import LittleLocked, run_limited
from mlx_stand_in import MlxStandIn

LAYOUT = SlotLayout((SlotPart("gate", 0, 8192), SlotPart("down", 8192, 4096)))
GIB = 1 << 30

Stand = TypeVar("Stand")


def opened(**options: object) -> Backend:
    """The backend with these options."""
    given = [BackendOption("metal_compat", key, value) for key, value in options.items()]
    return open_backend("metal_compat", options=given)


@pytest.fixture
def eight_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB are available."""
    memory = AvailableMemory(8 * GIB, "made up", 8 * GIB)
    monkeypatch.setattr(expertstream_metal_compat, "available_memory", lambda: memory)


LetLock = Callable[[int], LittleLocked]


@pytest.fixture(params=[False, True], ids=["the trial is free", "the trial takes memory"])
def let_lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LetLock:
    """Lets no more than so many bytes be locked from now on, on a system of either kind."""

    def let(limit_bytes: int) -> LittleLocked:
        system = LittleLocked(limit_bytes)
        monkeypatch.setattr(wiring, "_call", system.call)
        monkeypatch.setattr(wiring, "TRIAL_TAKES_MEMORY", request.param)
        monkeypatch.setattr(expertstream_metal_compat, "TRIAL_TAKES_MEMORY", request.param)
        return system

    return let


def locked_bytes() -> int:
    """What this process has locked, by the system's own account."""
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not tell how much memory a process has locked")
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


class TestSlots:
    def test_its_memory_is_whole_pages_of_which_some_are_wired(self) -> None:
        backend = opened(wire="try")
        store = backend.alloc_slot_store(LAYOUT, 3)
        memory = backend.measure_store(store)
        assert memory.slot_bytes == 3 * store_module.slot_stride_bytes(LAYOUT.slot_bytes, LAYOUT.alignment)
        assert 0 <= memory.pinned_bytes <= memory.slot_bytes
        store.close()

    def test_the_staging_is_the_slot(self) -> None:
        store = opened().alloc_slot_store(LAYOUT, 3)
        staging = store.stage(1)
        staging.view[:] = bytes(range(256)) * (LAYOUT.slot_bytes // 256)
        view = np.from_dlpack(store.device_view(1))  # type: ignore[arg-type]  # the view has DLPack
        assert view.shape == (LAYOUT.slot_bytes,)
        assert view.tobytes() == store.read_back(1) == bytes(range(256)) * (LAYOUT.slot_bytes // 256)
        store.close()

    @pytest.mark.parametrize("page_bytes", [4096, 16384, 65536])
    def test_a_slot_takes_whole_pages_of_any_size(self, monkeypatch: pytest.MonkeyPatch, page_bytes: int) -> None:
        monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
        store = opened(wire="off").alloc_slot_store(LAYOUT, 5)
        addresses = [np.asarray(store.device_view(slot)).ctypes.data for slot in range(5)]
        assert set(np.diff(addresses).tolist()) == {max(12288, page_bytes)}
        store.close()

    @pytest.mark.parametrize("alignment", [4096, 3 * 4096, 1 << 20])
    def test_slots_are_aligned_to_pages_and_to_what_the_layout_asks_for(self, alignment: int) -> None:
        store = opened().alloc_slot_store(SlotLayout(LAYOUT.parts, alignment), 4)
        for slot in range(4):
            address = np.asarray(store.device_view(slot)).ctypes.data
            assert address % alignment == 0
            assert address % mmap.PAGESIZE == 0
        store.close()

    @pytest.mark.parametrize("alignment", [4096, 3 * 4096])
    def test_slots_begin_at_pages_that_are_larger_than_the_alignment(
        self, monkeypatch: pytest.MonkeyPatch, alignment: int
    ) -> None:
        monkeypatch.setattr(mmap, "PAGESIZE", 1 << 20)  # so large that none begins there by chance
        store = opened(wire="off").alloc_slot_store(SlotLayout(LAYOUT.parts, alignment), 3)
        addresses = [np.asarray(store.device_view(slot)).ctypes.data for slot in range(3)]
        assert [address % (1 << 20) for address in addresses] == [0] * 3
        assert [address % alignment for address in addresses] == [0] * 3
        store.close()

    def test_more_than_there_is_is_refused_before_anything_is_taken(self) -> None:
        layout = SlotLayout((SlotPart("gate", 0, GIB),))
        before = locked_bytes()
        with pytest.raises(DeviceOutOfMemory, match=r"1099511627776000 bytes of memory; \d+ are available"):
            opened().alloc_slot_store(SlotLayout((SlotPart("gate", 0, 1000 * GIB),)), 1024)
        with pytest.raises(DeviceOutOfMemory):
            opened().alloc_slot_store(layout, 1 << 20)
        assert locked_bytes() == before


class TestWiring:
    def test_slots_are_wired_until_the_store_is_closed(self) -> None:
        before = locked_bytes()
        store = opened().alloc_slot_store(LAYOUT, 4)
        kept = store.device_view(0)
        assert locked_bytes() == before + 4 * 12288
        store.close()
        assert locked_bytes() == before
        del kept
        store = opened(wire="off").alloc_slot_store(LAYOUT, 4)
        assert locked_bytes() == before
        store.close()

    def test_a_listing_or_another_opening_wires_nothing_for_one_that_said_off(self) -> None:
        before = locked_bytes()
        unwired = opened(wire="off")
        wired = opened(wire="try")
        assert all(status.problem is None for status in probe_backends() if status.offer.name == "metal_compat")
        store = unwired.alloc_slot_store(LAYOUT, 4)
        assert locked_bytes() == before
        other = wired.alloc_slot_store(LAYOUT, 4)
        assert locked_bytes() > before
        store.close()
        other.close()

    def test_where_wiring_fails_partway_every_slot_works_and_a_warning_says_what_was_got(
        self, let_lock: LetLock
    ) -> None:
        system = let_lock(2 * 12288 + 8192)
        with structlog.testing.capture_logs() as log:
            store = opened().alloc_slot_store(LAYOUT, 5)
        assert isinstance(store, WiredStore)
        assert store.wired_bytes == system.locked_bytes == 2 * 12288
        (warning,) = [entry for entry in log if entry["event"] == "slots_wired_in_part"]
        assert (warning["wired_slots"], warning["slot_count"]) == (2, 5)
        assert (warning["wired_bytes"], warning["unwired_bytes"]) == (2 * 12288, 3 * 12288)
        assert "no room" in warning["error"]
        for slot in range(5):
            store.stage(slot).view[:] = bytes([slot + 1]) * LAYOUT.slot_bytes
        assert [set(store.read_back(slot)) for slot in range(5)] == [{1}, {2}, {3}, {4}, {5}]
        store.close()
        assert system.locked_bytes == 0

    @pytest.mark.parametrize("fitting", range(8))
    def test_what_is_required_is_granted_as_far_as_it_can_be_wired_and_then_is(
        self, let_lock: LetLock, fitting: int
    ) -> None:
        system = let_lock(fitting * 12288 + 8192)
        backend = opened(wire="require")
        budget = backend.budget_for_expert_size(12288, GIB, 7)
        assert budget.slots == fitting
        assert ("all of them can be wired" in budget.reason) == (fitting == 7)
        assert system.locked_bytes == 0, "a trial leaves nothing locked"
        assert system.called == {"mlock" if wiring.TRIAL_TAKES_MEMORY else "mlock2", "munlock"}
        store = backend.alloc_slot_store(LAYOUT, budget.slots)
        assert backend.measure_store(store).pinned_bytes == system.locked_bytes == fitting * 12288
        store.close()
        assert system.locked_bytes == 0

    def test_what_is_required_leaves_room_for_slots_of_other_classes_and_none_for_what_is_not_locked(
        self, let_lock: LetLock
    ) -> None:
        let_lock(10 * 12288)
        budget = opened(wire="require").budget_for_expert_size(12288, GIB, 100, other_slots_bytes=40960)
        assert budget.slots == 6
        assert (
            "6 of 100 slots of 12288 bytes could be wired, beside 40960 bytes of other slots: no room; "
            in budget.reason
        )
        assert budget.reason.endswith('; raise the limit, or set wire = "try"')
        assert opened(wire="require").budget_for_expert_size(12288, GIB, 100, other_slots_bytes=GIB // 2).slots == 0

    def test_what_need_not_be_wired_is_granted_whatever_can_be(self, let_lock: LetLock) -> None:
        system = let_lock(2 * 12288)
        budget = opened(wire="try").budget_for_expert_size(12288, 0, 5)
        assert budget.slots == 5
        assert ("; 2 of them could be wired" in budget.reason) == (not wiring.TRIAL_TAKES_MEMORY)
        assert opened(wire="off").budget_for_expert_size(12288, 0, 5).slots == 5
        assert system.locked_bytes == 0

    def test_what_cannot_be_wired_any_more_is_refused_and_nothing_is_kept(self, let_lock: LetLock) -> None:
        system = let_lock(5 * 12288)
        backend = opened(wire="require")
        assert backend.budget_for_expert_size(12288, 0, 5).slots == 5
        system.limit_bytes = 2 * 12288 + 4096  # something else was locked meanwhile
        with pytest.raises(DeviceOutOfMemory, match=r"5 slots, 61440 bytes, .* first 2 could be, 24576 bytes.*no room"):
            backend.alloc_slot_store(LAYOUT, 5)
        assert system.locked_bytes == 0

    def test_space_for_a_trial_that_cannot_be_had_is_no_slot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(12, "no space")

        monkeypatch.setattr(mmap, "mmap", refuse)
        assert wiring.wirable(4096, 8192, 3) == (0, "28672 bytes to try it with cannot be mapped: [Errno 12] no space")

    @pytest.mark.parametrize("takes_memory", [False, True])
    def test_the_systems_own_limit_is_met_without_an_error(self, takes_memory: bool) -> None:
        """In a process that may lock 256 KiB: what the budget grants can be had, for two classes together."""
        code = f"""
import json, logging, re
import expertstream_metal_compat as backend
from expertstream import DeviceOutOfMemory, SlotLayout, SlotPart
from expertstream_metal_compat import wiring
logging.basicConfig(format="%(message)s")
small, large = (SlotLayout((SlotPart("gate", 0, size),)) for size in (16384, 49152))
if {takes_memory}:
    backend.TRIAL_TAKES_MEMORY = wiring.TRIAL_TAKES_MEMORY = True
tried = backend.budget_for_expert_size(16384, 10**6, 100, 49152)
store = backend.alloc_slot_store(small, 20)
got = [store.wired_bytes // store._stride_bytes, store.slot_count]
store.close()
backend.configure(backend.Options(wire="require"))
first = backend.budget_for_expert_size(16384, 10**6, 100, 49152)
second = backend.budget_for_expert_size(49152, 10**6, 100, first.slots * 16384)
stores = [backend.alloc_slot_store(small, first.slots), backend.alloc_slot_store(large, second.slots)]
full = [store.memory.pinned_bytes == store.memory.slot_bytes for store in stores]
try:
    backend.alloc_slot_store(small, 3)
    refusal = ""
except DeviceOutOfMemory as error:
    refusal = str(error)
for store in stores:
    store.close()
print(json.dumps([tried.slots, tried.reason, got, first.slots, first.reason, second.slots, full, refusal]))
"""
        result = run_limited(262144, code)
        assert result.returncode == 0, result.stderr
        tried, tried_reason, got, first, first_reason, second, full, refusal = json.loads(result.stdout)
        unit = mmap.PAGESIZE
        small, large = -(-16384 // unit) * unit, -(-49152 // unit) * unit
        assert first == (262144 - large) // small
        assert second == (262144 - first * small) // large
        limit = "the limit on locked memory (ulimit -l) is 262144 bytes"
        assert (
            f"{first} of 100 slots of {small} bytes could be wired, beside 49152 bytes of other slots: " in first_reason
        )
        assert limit in first_reason
        assert full == [True, True]
        assert "3 slots, " in refusal
        assert "are to be wired; the first 0 could be, 0 bytes, and then: mlock of " in refusal
        assert tried == 100
        if not takes_memory:
            assert f"; {first} of them could be wired, beside 49152 bytes of other slots: " in tried_reason
            assert limit in tried_reason
        assert got == [262144 // small, 20]
        assert f"wired_slots={262144 // small}" in result.stderr


class TestBudget:
    def test_it_is_the_stated_part_of_what_is_available_less_the_resident_bytes(self, eight_gib: None) -> None:
        budget = opened().budget_for_expert_size(GIB, 2 * GIB, None)
        assert budget.slots == 4  # 75 % of 8 are 6
        assert "75 % of a recommended working set of 8589934592 bytes, all that is available: made up" in budget.reason
        assert opened(working_set_percent=100).budget_for_expert_size(GIB, 2 * GIB, None).slots == 6
        assert opened(working_set_percent=25).budget_for_expert_size(GIB, 2 * GIB, 7).slots == 0

    def test_a_configured_working_set_goes_before_what_is_available(self, eight_gib: None) -> None:
        budget = opened(recommended_working_set="4GiB").budget_for_expert_size(GIB, GIB, None)
        assert budget.slots == 2
        assert "75 % of a recommended working set of 4294967296 bytes, as configured" in budget.reason

    def test_no_configuration_makes_more_memory_than_there_is(self, eight_gib: None) -> None:
        budget = opened(recommended_working_set="1TiB").budget_for_expert_size(GIB, GIB, None)
        assert budget.slots == 7
        assert "are more than the 8589934592 bytes available" in budget.reason

    def test_a_slot_counts_as_the_whole_pages_that_it_takes(
        self, eight_gib: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mmap, "PAGESIZE", 16384)
        budget = opened(recommended_working_set="128KiB", working_set_percent=100).budget_for_expert_size(4096, 0, None)
        assert budget.slots == 8
        assert "8 slots of 16384 bytes" in budget.reason

    @pytest.mark.parametrize(
        ("option", "why"),
        [
            ({"working_set_percent": 101}, "working_set_percent"),
            ({"recommended_working_set": "50%"}, "50% is a share of something"),
            ({"wire": True}, "'try', 'require', 'off'"),
            ({"wires": "off"}, "did you mean 'wire'"),
        ],
    )
    def test_options_that_cannot_be_are_refused(self, option: dict[str, object], why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            opened(**option)


class TestStreams:
    def test_a_refill_waits_for_the_announced_read_and_not_for_what_came_later(self) -> None:
        streams = Streams()
        first, later = threading.Event(), threading.Event()
        streams.launch(1, first.wait)
        number = streams.last_launched(1)
        streams.launch(1, later.wait)
        waiting = threading.Thread(target=streams.wait, args=(1, number))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        first.set()
        waiting.join(10)
        assert not waiting.is_alive()
        later.set()
        streams.close()

    def test_work_that_fails_is_over_too(self) -> None:
        streams = Streams()
        failed = streams.launch(0, lambda: 1 // 0)
        streams.wait(0, streams.last_launched(0))
        with pytest.raises(ZeroDivisionError):
            failed.result()
        streams.close()

    def test_a_stream_without_work_is_not_waited_for(self) -> None:
        store = opened().alloc_slot_store(LAYOUT, 1)
        store.mark_read(0, 77)
        store.stage(0)
        store.close()

    def test_a_read_that_was_announced_sees_the_old_bytes(self) -> None:
        backend = opened()
        store = backend.alloc_slot_store(LAYOUT, 1)
        store.stage(0).view[:] = b"\x11" * LAYOUT.slot_bytes
        result = backend.hooks.launch_read(store=store, slot=0, stream=3, after_ms=30)
        store.mark_read(0, 3)
        store.stage(0).view[:] = b"\x22" * LAYOUT.slot_bytes
        assert set(result()) == {0x11}
        assert set(store.read_back(0)) == {0x22}
        store.close()


def array_of(a: Any, dtype: Any = None) -> Any:
    """`asarray` as it was first."""
    raise NotImplementedError


def copy_of(a: Any, dtype: Any = None, *, copy: bool | None = None) -> Any:
    """`asarray` when it always copied."""
    assert copy is False
    raise ValueError("Unable to avoid copy while creating an array as requested.")


class TestMlx:
    @pytest.fixture
    def mlx(self, monkeypatch: pytest.MonkeyPatch) -> MlxStandIn:
        return self.installed(MlxStandIn(), monkeypatch)

    @staticmethod
    def installed(mlx: Stand, monkeypatch: pytest.MonkeyPatch) -> Stand:
        monkeypatch.setitem(sys.modules, "mlx.core", mlx)  # type: ignore[arg-type]  # a stand-in for a module
        return mlx

    def test_without_it_its_views_are_refused(self) -> None:
        with pytest.raises(BackendUnavailable, match=r'needs MLX on a machine with Metal.*views = "numpy"'):
            opened(views="mlx")

    @pytest.mark.parametrize("page_bytes", [4096, 16384])
    def test_its_views_are_the_slots_in_whole_pages(
        self, monkeypatch: pytest.MonkeyPatch, mlx: MlxStandIn, page_bytes: int
    ) -> None:
        backend = opened(views="mlx", wire="off")
        monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
        store = backend.alloc_slot_store(LAYOUT, 2)
        adopted = mlx.adopted[-2:]
        assert all(pages.ctypes.data % page_bytes == 0 and pages.nbytes % page_bytes == 0 for pages in adopted)
        store.stage(1).view[:] = b"\x33" * LAYOUT.slot_bytes
        view = np.asarray(store.device_view(1))
        assert view.shape == (LAYOUT.slot_bytes,)
        assert np.shares_memory(view, adopted[1])
        assert set(view.tobytes()) == {0x33}
        store.close()

    def test_its_views_are_evaluated_so_that_any_thread_may_use_them(
        self, monkeypatch: pytest.MonkeyPatch, mlx: MlxStandIn
    ) -> None:
        backend = opened(views="mlx", wire="off")
        monkeypatch.setattr(mmap, "PAGESIZE", 16384)  # a slot is less than its pages, so its view is a slice
        store = backend.alloc_slot_store(LAYOUT, 2)
        with ThreadPoolExecutor(1) as other:
            other.submit(mlx.eval, [store.device_view(slot) for slot in range(2)]).result()
        store.close()

    def test_a_refill_waits_for_what_the_thread_that_marks_has_launched_and_the_mark_does_not(
        self, mlx: MlxStandIn
    ) -> None:
        store = opened(views="mlx").alloc_slot_store(LAYOUT, 2)
        with ThreadPoolExecutor(1) as kernels, ThreadPoolExecutor(1) as fillers:
            end_the_kernel = kernels.submit(mlx.launch_kernel).result()
            kernels.submit(store.mark_read, 1, 0).result(10)
            refill = fillers.submit(store.stage, 1)
            with pytest.raises(TimeoutError):
                refill.result(0.05)
            store.stage(0)  # which no kernel reads
            end_the_kernel()
            assert refill.result(10).slot == 1
        store.close()

    def test_slots_that_it_does_not_take_are_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = locked_bytes()
        self.installed(MlxStandIn(largest_bytes=mmap.PAGESIZE), monkeypatch)
        with pytest.raises(
            DeviceOutOfMemory, match=r"2 slots of 12288 bytes, 24576 bytes in all, without a copy: \[con"
        ):
            opened(views="mlx").alloc_slot_store(LAYOUT, 2)
        assert locked_bytes() == before

    @pytest.mark.parametrize(
        ("versions_own", "why"),
        [
            ({}, "no attribute 'asarray'"),
            ({"asarray": array_of}, "unexpected keyword argument 'copy'"),
            ({"asarray": copy_of}, "Unable to avoid copy"),
        ],
    )
    def test_one_that_would_copy_is_refused_beforehand(
        self, monkeypatch: pytest.MonkeyPatch, versions_own: dict[str, object], why: str
    ) -> None:
        self.installed(SimpleNamespace(metal=MlxStandIn.metal, **versions_own), monkeypatch)
        with pytest.raises(
            BackendUnavailable, match=rf"without a copy, which 0\.32\.1 is the first .* update it: .*{why}"
        ):
            opened(views="mlx")

    def test_its_device_says_the_working_set(self, mlx: MlxStandIn, eight_gib: None) -> None:
        backend = opened()
        budget = backend.budget_for_expert_size(GIB, GIB, None)
        assert budget.slots == 2
        assert "working set of 4294967296 bytes, as M0 says" in budget.reason
        assert backend.describe_device().name == "M0"
        assert backend.describe_device().memory_bytes == 8 * GIB

    @pytest.mark.parametrize(("views", "dlpack_type"), [("numpy", 1), ("mlx", 8)])
    def test_the_description_says_whose_views_there_will_be(
        self, mlx: MlxStandIn, views: str, dlpack_type: int
    ) -> None:
        assert opened(views=views).describe_device().dlpack_type == dlpack_type
