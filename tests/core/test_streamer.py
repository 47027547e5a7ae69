"""The streamer against the bytes of telling checkpoints, with faults injected below it and beside it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import checkpoint_files
from expertstream import (
    BackendContractError,
    Checkpoint,
    Demand,
    ExpertKey,
    ExpertStreamer,
    MemoryRequest,
    ReadFailed,
    StoreClosed,
    StreamSettings,
    UsageError,
    available_memory,
    hookimpl,
    make_plan,
    open_backend,
    open_checkpoint,
)
from expertstream.filler import RawFile, open_raw_file
from expertstream.policies import policy_names

NO_DEMAND = Demand(resident_bytes=0, kv_cache_bytes=0, workspace_bytes=0, context_tokens=0)
EXPERTS = 8


@pytest.fixture
def written(tmp_path: Path) -> checkpoint_files.Written:
    """Four layers in two size classes, none of whose parts is whole pages, in two shards."""
    return checkpoint_files.write_checkpoint(tmp_path / "telling.gguf", shards=2)


def open_streamer(
    written: checkpoint_files.Written, budget: str = "all", *, observers: Sequence[object] = (), **options: object
) -> ExpertStreamer:
    checkpoint = open_checkpoint(written.path)
    backend = open_backend("cpu", observers)
    open_file = options.pop("open_file", open_raw_file)
    plan = make_plan(checkpoint, NO_DEMAND, MemoryRequest.parse(budget), backend, available_memory())
    settings = StreamSettings(backend="cpu", **options)  # type: ignore[arg-type]  # options of every type
    return ExpertStreamer(checkpoint, plan, backend, settings, open_file=open_file)  # type: ignore[arg-type]


def smallest(written: checkpoint_files.Written) -> str:
    checkpoint = open_checkpoint(written.path)
    plan = make_plan(checkpoint, NO_DEMAND, MemoryRequest.parse("all"), open_backend("cpu"), available_memory())
    return str(plan.smallest_bytes)


def parts_of(checkpoint: Checkpoint, layer: int) -> list[str]:
    return next([part.name for part in found.parts] for found in checkpoint.layers if found.layer == layer)


def assert_holds(lease: object, written: checkpoint_files.Written, layer: int, experts: Sequence[int]) -> None:
    for position, expert in enumerate(experts):
        view = lease.view(position)  # type: ignore[attr-defined]
        for name, part in view.items():
            assert bytes(np.from_dlpack(part)) == written.part_bytes(layer, expert, name), (layer, expert, name)


@pytest.mark.parametrize("budget", ["all", "50%", "smallest"])
@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("io_mode", ["direct", "buffered"])
def test_every_slots_bytes_equal_the_files(
    written: checkpoint_files.Written, budget: str, policy: str, io_mode: str
) -> None:
    budget = smallest(written) if budget == "smallest" else budget
    with open_streamer(written, budget, policy=policy, io_mode=io_mode, filler_threads=3) as streamer:
        assert streamer.io_mode == io_mode
        random = np.random.default_rng(5)
        for _ in range(40):
            layer = int(random.integers(4))
            experts = random.choice(EXPERTS, 2, replace=False)
            with streamer.acquire(layer, experts) as lease:
                assert_holds(lease, written, layer, experts.tolist())


def test_merged_projections_are_one_part(tmp_path: Path) -> None:
    written = checkpoint_files.write_checkpoint(
        tmp_path / "merged.gguf", layers=[{"gate_up": "Q4_0", "down": "Q8_0"}] * 2
    )
    with open_streamer(written) as streamer, streamer.acquire(1, [7, 0]) as lease:
        assert set(lease.view(0)) == {"gate_up", "down"}
        assert_holds(lease, written, 1, [7, 0])


def test_a_step_of_all_experts_in_rounds_reads_each_once_and_in_order(written: checkpoint_files.Written) -> None:
    with open_streamer(written, smallest(written)) as streamer:
        for layer in range(4):
            before = streamer.counters
            seen: list[int] = []
            for lease in streamer.rounds(layer, np.arange(EXPERTS), np.full(EXPERTS, 16)):
                assert_holds(lease, written, layer, lease.experts.tolist())
                seen += lease.experts.tolist()
            cost = streamer.counters - before
            assert seen == list(range(EXPERTS))
            assert cost.steps == 1
            assert cost.exhausted == 1
            assert cost.hits + cost.misses == EXPERTS
            assert cost.misses <= EXPERTS


def test_rounds_use_what_is_resident_before_it_goes(written: checkpoint_files.Written) -> None:
    with open_streamer(written, "all") as streamer:
        for _ in range(2):
            for _lease in streamer.rounds(0, np.arange(EXPERTS), np.ones(EXPERTS, np.int64)):
                pass
        assert streamer.counters.misses == EXPERTS
        assert streamer.counters.exhausted == 0
    with open_streamer(written, smallest(written)) as streamer:
        streamer.acquire(0, [6, 7]).release()
        for _lease in streamer.rounds(0, np.arange(5, 8), np.ones(3, np.int64)):
            pass
        # Six slots would be needed to keep both; one of the two at least is still used in place.
        assert streamer.counters.hits >= 1


def test_rounds_that_are_abandoned_leave_no_lease(written: checkpoint_files.Written) -> None:
    with open_streamer(written, smallest(written)) as streamer:
        for _ in range(3):
            steps = streamer.rounds(0, np.arange(EXPERTS), np.ones(EXPERTS, np.int64))
            next(steps)
            steps.close()
        with streamer.acquire(0, [1, 2]) as lease:
            assert_holds(lease, written, 0, [1, 2])


def test_what_a_lease_holds_does_not_change_while_others_come_and_go(written: checkpoint_files.Written) -> None:
    with open_streamer(written, "50%") as streamer, streamer.acquire(0, [3, 4]) as held:
        for expert in (0, 1, 2, 5, 6, 7):
            streamer.acquire(0, [expert]).release()
            assert_holds(held, written, 0, [3, 4])


def test_more_experts_than_slots_are_refused_and_nothing_is_lost(written: checkpoint_files.Written) -> None:
    with open_streamer(written, smallest(written)) as streamer:
        for _ in range(3):
            with pytest.raises(UsageError, match=r"8 experts of layer 3 .* 2 slots, 2 of them free.*rounds"):
                streamer.acquire(3, range(EXPERTS))
        streamer.acquire(3, [0, 1]).release()
        with streamer.acquire(3, [0]), streamer.acquire(3, [1]), pytest.raises(UsageError, match="0 of them free"):
            streamer.acquire(3, [2])


@pytest.mark.parametrize(("layer", "experts"), [(9, [0]), (-1, [0]), (0, [8]), (0, [-1]), (0, [0, 99])])
def test_what_does_not_exist_is_refused(written: checkpoint_files.Written, layer: int, experts: list[int]) -> None:
    with open_streamer(written) as streamer:
        with pytest.raises(UsageError, match=r"no routed experts|which has 0 to 7"):
            streamer.acquire(layer, experts)
        with pytest.raises(UsageError, match=r"no routed experts|which has 0 to 7"):
            next(streamer.rounds(layer, experts, np.ones(len(experts), np.int64)))
        assert streamer.counters.steps == 0
        for good in range(4):
            streamer.acquire(good, [0]).release()


def test_hits_are_ready_while_misses_are_pending(written: checkpoint_files.Written) -> None:
    with open_streamer(written) as streamer:
        streamer.acquire(2, [5]).release()
        with streamer.acquire(2, [1, 5], wait=False) as lease:
            assert lease.ready.tolist() == [1]
            assert lease.pending.tolist() == [0]
            lease.wait()
            assert_holds(lease, written, 2, [1, 5])


def test_the_counters_say_what_was_read(written: checkpoint_files.Written) -> None:
    with open_streamer(written) as streamer:
        streamer.acquire(3, [0, 1]).release()
        streamer.acquire(3, [1, 2]).release()
        streamer.acquire(0, [1]).release()
        counters = streamer.counters
        assert (counters.steps, counters.hits, counters.misses) == (3, 1, 4)
        assert counters.expert_bytes_read == 3 * 110_592 + 55_296
        assert counters.hit_rate == 1 / 5


class FaultyFile:
    """A real file whose reads fail where `fails` says so."""

    def __init__(self, raw: RawFile, fails: Callable[[int], bool]) -> None:
        self._raw, self._fails = raw, fails

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        if self._fails(offset):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._raw.pread_into(buffer, offset)

    def close(self) -> None:
        self._raw.close()


def test_a_failed_read_reaches_the_caller_and_loses_no_slot(written: checkpoint_files.Written) -> None:
    checkpoint = open_checkpoint(written.path)
    broken = checkpoint.layers[2].parts[1]
    start = int(broken.offsets[3]) // 4096 * 4096  # where the direct read of that part begins, and no other one
    attempts = 0

    def fails(offset: int) -> bool:
        nonlocal attempts
        attempts += offset == start
        return offset == start and attempts <= 10

    shard = checkpoint.files[int(broken.files[3])]

    def open_file(path: Path, direct: bool) -> RawFile:
        raw = open_raw_file(path, direct)
        return FaultyFile(raw, fails) if path == shard else raw

    with open_streamer(written, smallest(written), open_file=open_file) as streamer:
        for _ in range(10):
            with pytest.raises(ReadFailed, match=rf"{shard.name}.*offset.*EIO"):
                streamer.acquire(2, [3, 4])
            with streamer.acquire(2, [4, 5]) as lease:  # the others stay usable
                assert_holds(lease, written, 2, [4, 5])
        with streamer.acquire(2, [3, 4]) as lease:
            assert_holds(lease, written, 2, [3, 4])


def test_a_failure_in_rounds_ends_the_step_and_leaves_the_streamer_usable(written: checkpoint_files.Written) -> None:
    checkpoint = open_checkpoint(written.path)
    part = checkpoint.layers[1].parts[0]
    bad = int(part.offsets[5]) // 4096 * 4096
    broken = True

    def open_file(path: Path, direct: bool) -> RawFile:
        raw = open_raw_file(path, direct)
        here = path == checkpoint.files[int(part.files[5])]
        return FaultyFile(raw, lambda offset: broken and offset == bad) if here else raw

    with open_streamer(written, smallest(written), open_file=open_file, filler_threads=2) as streamer:
        steps = streamer.rounds(1, np.arange(EXPERTS), np.ones(EXPERTS, np.int64))
        assert [next(steps).experts.tolist() for _ in range(5)] == [[0], [1], [2], [3], [4]]
        with pytest.raises(ReadFailed):
            next(steps)
        broken = False
        for lease in streamer.rounds(1, np.arange(EXPERTS), np.ones(EXPERTS, np.int64)):
            assert_holds(lease, written, 1, lease.experts.tolist())


def test_an_expert_under_way_for_one_lease_is_waited_for_by_the_next(written: checkpoint_files.Written) -> None:
    gate = threading.Event()

    def open_file(path: Path, direct: bool) -> RawFile:
        return GatedFile(open_raw_file(path, direct), gate)

    with open_streamer(written, open_file=open_file) as streamer:
        GatedFile.armed = True
        try:
            first = streamer.acquire(0, [2], wait=False)
            second = streamer.acquire(0, [2], wait=False)
            assert second.pending.tolist() == [0]
            assert streamer.counters.misses == 1
            gate.set()
            second.wait()
            assert_holds(second, written, 0, [2])
            first.release()
            assert_holds(second, written, 0, [2])
            second.release()
        finally:
            GatedFile.armed = False
            gate.set()


class GatedFile:
    """A real file whose reads wait for a gate once armed (the probing reads pass)."""

    armed = False

    def __init__(self, raw: RawFile, gate: threading.Event) -> None:
        self._raw, self._gate = raw, gate

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        if GatedFile.armed:
            self._gate.wait(60)
        return self._raw.pread_into(buffer, offset)

    def close(self) -> None:
        self._raw.close()


def test_many_threads_may_use_one_streamer(written: checkpoint_files.Written) -> None:
    errors: list[BaseException] = []

    def work(seed: int, streamer: ExpertStreamer) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(60):
                layer, expert = int(random.integers(4)), int(random.integers(EXPERTS))
                with streamer.acquire(layer, [expert]) as lease:
                    assert_holds(lease, written, layer, [expert])
        except BaseException as error:  # noqa: BLE001  # carried to the test's own thread
            errors.append(error)

    # One lease a thread at most, and the smallest class has three slots: fewer would be refused, not waited for.
    with open_streamer(written, "60%", filler_threads=4) as streamer:
        threads = [threading.Thread(target=work, args=(seed, streamer)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.usefixtures("no_thread_stays")
def test_closing_ends_every_thread_and_what_comes_after_is_refused(written: checkpoint_files.Written) -> None:
    streamer = open_streamer(written)
    lease = streamer.acquire(0, [0])
    streamer.close()
    streamer.close()
    lease.release()
    with pytest.raises(StoreClosed):
        streamer.acquire(0, [0])
    with pytest.raises(StoreClosed):
        lease.view(0)


@pytest.mark.usefixtures("no_thread_stays")
def test_an_allocation_that_fails_leaves_nothing_open(written: checkpoint_files.Written) -> None:
    closed: list[int] = []

    class FailSecond:
        """Lets the first store through and fails the second."""

        calls = 0

        @hookimpl(wrapper=True)
        def alloc_slot_store(self) -> Iterator[None]:
            self.calls += 1
            if self.calls == 2:
                raise MemoryError("no second store")
            store = yield
            real_close = store.close
            store.close = lambda: (closed.append(1), real_close())
            return store

    with pytest.raises(MemoryError):
        open_streamer(written, observers=[FailSecond()])
    assert closed == [1]


def test_seeding_loads_what_the_backend_chooses(written: checkpoint_files.Written) -> None:
    class Choose:
        """A backend's own mind about seeding, as a wrapper."""

        @hookimpl(wrapper=True)
        def seed_experts(self, hottest: Sequence[ExpertKey]) -> Iterator[None]:
            yield
            return list(hottest)[1:2]

    keys = [ExpertKey(0, 4), ExpertKey(0, 6), ExpertKey(3, 1), ExpertKey(3, 2)]
    with open_streamer(written, "50%") as streamer:
        assert streamer.seed(keys) == 4
        streamer.acquire(0, [4, 6]).release()
        assert streamer.counters.misses == 4
    with open_streamer(written, "50%", observers=[Choose()]) as streamer:
        assert streamer.seed(keys) == 2  # one of each size class


def test_a_seed_outside_the_list_is_refused(written: checkpoint_files.Written) -> None:
    class Invent:
        """Seeds an expert that nobody named."""

        @hookimpl(wrapper=True)
        def seed_experts(self) -> Iterator[None]:
            yield
            return [ExpertKey(0, 7)]

    with (
        open_streamer(written, observers=[Invent()]) as streamer,
        pytest.raises(BackendContractError, match="1 not in"),
    ):
        streamer.seed([ExpertKey(0, 1)])
