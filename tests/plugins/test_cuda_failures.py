"""A CUDA driver that fails at one call: the error comes out as one of this library's; no buffer or order is lost."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

import expertstream_cuda_unified
from expertstream import (
    CommitFailed,
    DeviceOutOfMemory,
    MachineError,
    SlotLayout,
    SlotPart,
    SlotStore,
    StoreMemory,
    open_backend,
)
from expertstream.config import BackendOption
from expertstream_cuda import Device
from expertstream_cuda import device as device_module
from expertstream_cuda_discrete.store import DeviceStore
from expertstream_cuda_unified.store import HostStore

LAYOUT = SlotLayout((SlotPart("gate", 0, 4096),))
READER = 11  # a stream


class FakeError(Exception):
    """What CuPy's runtime raises."""

    status = 700


class FakeRuntime:
    """A CUDA runtime that notes its calls and fails at those named in `failing`; device memory is never touched."""

    CUDARuntimeError = FakeError
    streamNonBlocking, hostAllocPortable, memcpyHostToDevice = 1, 1, 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.failing: set[str] = set()
        self.event_count = 0
        self.pinned: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, list(arguments)))
            if name in self.failing:
                raise FakeError(f"{name} failed")
            return 1 << 20

        return call

    def hostAlloc(self, size_bytes: int, flags: int) -> int:
        self.calls.append(("hostAlloc", [size_bytes, flags]))
        if "hostAlloc" in self.failing:
            raise FakeError("hostAlloc failed")
        self.pinned.append((ctypes.c_uint8 * size_bytes)())
        return ctypes.addressof(self.pinned[-1])

    def memGetInfo(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def named(self, name: str) -> list[list[Any]]:
        """The arguments of each call of that name."""
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """The runtime that a stand-in for CuPy is made of."""
    fake = FakeRuntime()

    class Event:
        def __init__(self, disable_timing: bool) -> None:
            fake.eventCreate()
            fake.event_count += 1
            self.ptr = fake.event_count

        @property
        def done(self) -> bool:
            return fake.eventQuery(self.ptr) < 0  # never before it was waited for

        def synchronize(self) -> None:
            fake.eventSynchronize(self.ptr)

    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    vars(cupy)["cuda"] = cuda
    vars(cuda).update(Event=Event, runtime=fake)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return fake


def discrete(runtime: FakeRuntime, buffer_count: int = 1) -> DeviceStore:
    return DeviceStore(Device(0, "Fake GPU", runtime), LAYOUT, 2, buffer_count)


def unified(runtime: FakeRuntime) -> HostStore:
    return HostStore(Device(0, "Fake GPU", runtime), LAYOUT, 2, registered=True)


@pytest.mark.parametrize("call", ["eventQuery", "eventSynchronize"])
def test_a_buffer_whose_copy_cannot_be_waited_for_is_lent_again_later(runtime: FakeRuntime, call: str) -> None:
    store = discrete(runtime)
    store.commit(store.stage(0))
    runtime.failing = {call}
    for _ in range(2):  # the one buffer there is; a second call would block for ever without it
        with pytest.raises(MachineError, match=f"CUDA device 0 .Fake GPU.: {call} failed"):
            store.stage(1)
    runtime.failing = set()
    waited = len(runtime.named("eventSynchronize"))
    assert store.stage(1).slot == 1
    assert len(runtime.named("eventSynchronize")) == waited + 1


@pytest.mark.parametrize("call", ["setDevice", "streamWaitEvent", "memcpyAsync", "eventRecord", "eventCreate"])
def test_a_commit_that_fails_gives_its_buffer_back(runtime: FakeRuntime, call: str) -> None:
    store = discrete(runtime)
    if call == "streamWaitEvent":
        store.mark_read(0, READER)
    staging = store.stage(0)
    runtime.failing = {call}
    with pytest.raises(CommitFailed, match=f"slot 0 of CUDA device 0 .Fake GPU.: {call} failed"):
        store.commit(staging)
    runtime.failing = set()
    store.commit(store.stage(0)).wait()


def test_a_commit_tried_again_waits_for_the_readers_that_it_failed_to_wait_for(runtime: FakeRuntime) -> None:
    store = discrete(runtime)
    store.mark_read(0, READER)
    event = runtime.event_count
    runtime.failing = {"streamWaitEvent"}
    with pytest.raises(CommitFailed):
        store.commit(store.stage(0))
    runtime.failing = set()
    runtime.calls.clear()
    store.commit(store.stage(0))
    assert [waited for _, waited in runtime.named("streamWaitEvent")] == [event]


def test_a_reader_that_could_not_be_recorded_is_not_waited_for(runtime: FakeRuntime) -> None:
    store = discrete(runtime)
    runtime.failing = {"eventRecord"}
    with pytest.raises(MachineError, match="eventRecord failed"):
        store.mark_read(0, READER)
    runtime.failing = set()
    store.commit(store.stage(0))
    assert not runtime.named("streamWaitEvent")


@pytest.mark.parametrize("call", ["setDevice", "eventQuery", "eventSynchronize", "streamWaitEvent"])
def test_a_commit_under_way_tells_of_the_drivers_error(runtime: FakeRuntime, call: str) -> None:
    store = discrete(runtime)
    commit = store.commit(store.stage(1))
    runtime.failing = {call}
    asked = [commit.done, commit.wait, lambda: commit.order_before(READER)]
    failing = {"eventQuery": asked[:1], "eventSynchronize": asked[1:2], "streamWaitEvent": asked[2:]}.get(call, asked)
    for ask in failing:
        with pytest.raises(CommitFailed, match=f"slot 1 .*{call} failed"):
            ask()


@pytest.mark.parametrize("make", [discrete, unified])
def test_every_call_of_a_store_on_a_device_that_is_lost_is_a_machine_error(
    runtime: FakeRuntime, make: Callable[[FakeRuntime], SlotStore]
) -> None:
    store = make(runtime)
    runtime.failing = {"setDevice"}
    for call in (lambda: store.stage(0), lambda: store.mark_read(0, READER), store.close):
        with pytest.raises(MachineError, match="setDevice failed"):
            call()
    with pytest.raises(MachineError):
        make(runtime)


def test_a_stream_that_cannot_be_had_gives_back_what_was_taken(runtime: FakeRuntime) -> None:
    runtime.failing = {"streamCreateWithFlags"}
    with pytest.raises(MachineError, match="streamCreateWithFlags failed"):
        discrete(runtime)
    assert len(runtime.named("free")) == len(runtime.named("freeHost")) == 1


def test_memory_that_cannot_be_registered_is_out_of_memory(runtime: FakeRuntime) -> None:
    runtime.failing = {"hostRegister"}
    with pytest.raises(DeviceOutOfMemory, match="hostRegister failed"):
        unified(runtime)


def test_what_was_registered_with_the_device_is_measured_as_pinned(runtime: FakeRuntime) -> None:
    registered = unified(runtime)
    ((_, size_bytes, _),) = runtime.named("hostRegister")
    assert size_bytes >= 2 * LAYOUT.slot_bytes
    assert expertstream_cuda_unified.measure_store(store=registered) == StoreMemory(size_bytes, size_bytes)
    in_place = HostStore(registered.device, LAYOUT, 2, registered=False)
    assert expertstream_cuda_unified.measure_store(store=in_place) == StoreMemory(size_bytes, 0)


def test_a_slot_in_host_memory_is_not_lent_before_a_reader_that_could_not_be_waited_for(runtime: FakeRuntime) -> None:
    store = unified(runtime)
    store.mark_read(0, READER)
    runtime.failing = {"eventSynchronize"}
    for _ in range(2):
        with pytest.raises(MachineError, match="eventSynchronize failed"):
            store.stage(0)
    runtime.failing = set()
    assert store.stage(0).slot == 0


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> Iterator[FakeRuntime]:
    properties = {"name": b"Fake GPU", "uuid": bytes(16)}
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda number: properties, raising=False)
    monkeypatch.setattr(device_module, "_runtime", lambda: runtime)
    counts: list[int] = []
    monkeypatch.setattr(runtime, "getDeviceCount", lambda: counts.append(2) or 2, raising=False)
    monkeypatch.setattr(runtime, "counts", counts, raising=False)
    device_module.open_device.cache_clear()
    yield runtime
    device_module.open_device.cache_clear()


def test_a_device_is_looked_for_and_logged_once(two_devices: FakeRuntime) -> None:
    with capture_logs() as events:
        assert {device_module.open_device("1").number for _ in range(3)} == {1}
    assert [(event["event"], event["device"], event["of"]) for event in events] == [("cuda_device_chosen", 1, 2)]
    assert vars(two_devices)["counts"] == [2]


def test_a_host_slot_is_filled_again_only_after_its_last_copy_either_way(runtime: FakeRuntime) -> None:
    store = discrete(runtime)
    host_slots = store.host_slots(2)
    store.commit(host_slots.stage(0, 1))
    assert not runtime.named("eventSynchronize")
    store.commit(host_slots.restage(0, 0))  # another copy out of it, which waits for nothing here
    host_slots.keep(1, 1)
    assert not runtime.named("eventSynchronize")
    for host_slot in (0, 1):
        waited = len(runtime.named("eventSynchronize"))
        store.discard(host_slots.stage(host_slot, 0))
        assert len(runtime.named("eventSynchronize")) == waited + 1
    assert store.stage(0).view is not host_slots.restage(0, 0).view  # a discarded one goes to nobody else


@pytest.mark.parametrize("copies", ["commit", "keep"])
def test_a_copy_whose_end_could_not_be_noted_is_waited_for_at_once(runtime: FakeRuntime, copies: str) -> None:
    """Else its buffer would be filled while the device still reads or writes it."""
    store = discrete(runtime)
    host_slots = store.host_slots(1)
    staging = host_slots.stage(0, 1)
    runtime.failing = {"eventRecord"}
    with pytest.raises(CommitFailed, match=r"slot 1 of CUDA device 0 .Fake GPU.: eventRecord failed"):
        store.commit(staging) if copies == "commit" else host_slots.keep(1, 0)
    assert len(runtime.named("streamSynchronize")) == 1


@pytest.mark.parametrize("count", [8, 3])
def test_a_budget_tells_the_bytes_of_the_staging_buffers_that_a_store_pins(
    two_devices: FakeRuntime, count: int
) -> None:
    options = [] if count == 8 else [BackendOption("cuda_discrete", "staging_buffers", count)]
    backend = open_backend("cuda_discrete", options=options)
    budget = backend.budget_for_expert_size(LAYOUT.slot_bytes, 0, 2)
    assert budget.staging_bytes == count * LAYOUT.slot_bytes + LAYOUT.alignment
    assert backend.measure_store(backend.alloc_slot_store(LAYOUT, 2)).pinned_bytes == budget.staging_bytes


def test_host_slots_count_as_pinned_memory_until_the_store_is_closed(runtime: FakeRuntime) -> None:
    store = discrete(runtime)
    before = store.memory.pinned_bytes
    store.host_slots(3)
    assert store.memory.pinned_bytes >= before + 3 * LAYOUT.slot_bytes
    allocated = len(runtime.named("hostAlloc"))
    runtime.failing = {"hostAlloc"}
    with pytest.raises(DeviceOutOfMemory, match=r"5 buffers of \d+ bytes need \d+ bytes of pinned host memory"):
        store.host_slots(5)
    runtime.failing = set()
    store.close()
    assert len(runtime.named("freeHost")) == allocated
