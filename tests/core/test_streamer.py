"""The streamer against the bytes of telling checkpoints, with faults injected below it and beside it."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

import checkpoint_files
import memory_backend
from expertstream import (
    BackendContractError,
    Checkpoint,
    CheckpointError,
    CommitFailed,
    Demand,
    DeviceOutOfMemory,
    ExpertKey,
    ExpertStreamer,
    Lease,
    MachineError,
    MemoryRequest,
    ReadFailed,
    Staging,
    StoreClosed,
    UsageError,
    available_memory,
    hookimpl,
    make_plan,
    open_backend,
    open_checkpoint,
    residency,
)
from expertstream.filler import RawFile, Ticket, open_raw_file
from expertstream.policies import make_policy, policy_names, prepare_step

NO_DEMAND = Demand(resident_bytes=0, kv_cache_bytes=0, workspace_bytes=0, context_tokens=0)
EXPERTS = 8


@pytest.fixture(autouse=True)
def _backend_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_backend.offer(monkeypatch)


@pytest.fixture
def written(tmp_path: Path) -> checkpoint_files.Written:
    """Four layers in two size classes, none of whose parts is whole pages, in two shards."""
    return checkpoint_files.write_checkpoint(tmp_path / "telling.gguf", shards=2)


def open_streamer(
    written: checkpoint_files.Written, budget: str = "all", *, observers: Sequence[object] = (), **options: object
) -> ExpertStreamer:
    checkpoint = open_checkpoint(written.path)
    backend = open_backend(memory_backend.NAME, observers)
    open_file = options.pop("open_file", open_raw_file)
    plan = make_plan(checkpoint, NO_DEMAND, MemoryRequest.parse(budget), backend, available_memory())
    return ExpertStreamer(checkpoint, plan, backend, open_file=open_file, **options)  # type: ignore[arg-type]  # options of every type


def smallest(written: checkpoint_files.Written) -> str:
    checkpoint = open_checkpoint(written.path)
    plan = make_plan(
        checkpoint, NO_DEMAND, MemoryRequest.parse("all"), open_backend(memory_backend.NAME), available_memory()
    )
    return str(plan.smallest_bytes)


@pytest.mark.parametrize("policy", policy_names())
def test_after_the_preparation_no_step_compiles_anything(written: checkpoint_files.Written, policy: str) -> None:
    prepare_step(policy)
    steps = make_policy(policy, 1)
    compiled: list[Any] = [
        *(residency.lease, residency.release, residency.announce, residency.free_slots),
        *(steps.layer_step, steps.select),
    ]
    before = [list(function.signatures) for function in compiled]
    with open_streamer(written, smallest(written), policy=policy) as streamer:
        for tokens, experts in ((3, range(EXPERTS)), (1, range(2)), (1, range(1, 3))):
            streamer.begin_pass(tokens)
            for layer in (0, 3):
                with streamer.acquire(layer, list(experts)[:2]):
                    pass
                for lease in streamer.rounds(layer, experts, [1] * len(experts)):
                    lease.release()
    assert [list(function.signatures) for function in compiled] == before


def parts_of(checkpoint: Checkpoint, layer: int) -> list[str]:
    return next([part.name for part in found.parts] for found in checkpoint.layers if found.layer == layer)


def assert_holds(lease: object, written: checkpoint_files.Written, layer: int, experts: Sequence[int]) -> None:
    for position, expert in enumerate(experts):
        view = lease.view(position)  # type: ignore[attr-defined]
        for name, part in view.items():
            assert bytes(np.from_dlpack(part)) == written.part_bytes(layer, expert, name), (layer, expert, name)


def assert_part_holds(lease: Lease, position: int, written: checkpoint_files.Written, layer: int, expert: int) -> None:
    for name, part in lease.view(position).items():
        assert bytes(np.from_dlpack(part)) == written.part_bytes(layer, expert, name)


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
            assert (cost.hits, cost.misses) == (0, EXPERTS)
            assert cost.expert_bytes_read == EXPERTS * sum(
                written.parts[layer, part] for part in parts_of(open_checkpoint(written.path), layer)
            )


def test_rounds_use_what_is_resident_before_it_goes(written: checkpoint_files.Written) -> None:
    with open_streamer(written, "all") as streamer:
        for _ in range(2):
            for _lease in streamer.rounds(0, np.arange(EXPERTS), np.ones(EXPERTS, np.int64)):
                pass
        assert streamer.counters.misses == EXPERTS
        assert streamer.counters.exhausted == 0
    with open_streamer(written, "50%") as streamer:
        first, end = streamer._tables.slot_range[3].tolist()
        slots = end - first
        assert 2 < slots < EXPERTS
        for expert in range(EXPERTS - slots, EXPERTS):  # the last ones in order fill every slot
            streamer.acquire(3, [expert]).release()
        before = streamer.counters
        for lease in streamer.rounds(3, np.arange(EXPERTS), np.ones(EXPERTS, np.int64)):
            assert_holds(lease, written, 3, lease.experts.tolist())
        cost = streamer.counters - before
        # One of them makes room for all that are missing, one after the other, and is read again at its own turn.
        assert cost.hits == slots - 1
        assert cost.misses == EXPERTS - slots + 1


def test_a_run_of_readable_experts_is_one_lease_within_the_tokens_of_the_pass(
    written: checkpoint_files.Written,
) -> None:
    everyone = np.arange(EXPERTS)
    with open_streamer(written) as streamer:
        for _lease in streamer.rounds(1, everyone, np.ones(EXPERTS, np.int64)):
            pass
        streamer.begin_pass(100)
        runs = []
        for lease in streamer.rounds(1, everyone, np.array([90, 5, 5, 60, 40, 30, 30, 41])):
            assert_holds(lease, written, 1, lease.experts.tolist())
            runs.append(lease.experts.tolist())
        assert runs == [[0, 1, 2], [3, 4], [5, 6], [7]]


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


def interrupted_at(real: Callable[..., object], call: int, *, before: bool) -> Callable[..., object]:
    """`real`, with a KeyboardInterrupt before or after its work at that call."""
    calls = itertools.count()

    def interrupted(*arguments: object, **options: object) -> object:
        is_now = next(calls) == call
        if is_now and before:
            raise KeyboardInterrupt
        answer = real(*arguments, **options)
        if is_now:
            raise KeyboardInterrupt
        return answer

    return interrupted


def test_an_interrupt_between_rounds_leaves_no_lease_and_no_mark(
    written: checkpoint_files.Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone, counts = np.arange(EXPERTS), np.ones(EXPERTS, np.int64)
    with open_streamer(written, "50%") as streamer:
        streamer.begin_pass(100)
        for _lease in streamer.rounds(0, everyone, counts):
            pass
        for name in ("_readable_run", "_issue_spare", "_load", "_reap", "_wait"):
            for call in range(4):
                with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                    patch.setattr(streamer, name, interrupted_at(getattr(streamer, name), call, before=call % 2 == 0))
                    for _lease in streamer.rounds(0, everyone, counts):
                        pass
                assert not streamer._tables.leases.any(), (name, call)
        for layer in range(4):
            for lease in streamer.rounds(layer, everyone, counts):
                assert_holds(lease, written, layer, lease.experts.tolist())
        assert not streamer._tables.turn.any()
        assert not streamer._loads


class ExclusiveStore:
    """A wrapper that notices a reader that is told of while its slot is being filled, or twice at once."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.clashes: list[str] = []

    @hookimpl(wrapper=True)
    def alloc_slot_store(self) -> Iterator[None]:
        store = yield
        real_stage = store.stage

        def stage(slot: int) -> object:
            self.busy.add(slot)
            threading.Event().wait(0.02)
            return real_stage(slot)

        def mark_read(slot: int, stream: int) -> None:
            if slot in self.busy:
                self.clashes.append(f"slot {slot} was read while it was filled")
            self.busy.add(slot)
            threading.Event().wait(0.001)
            self.busy.discard(slot)

        store.stage, store.mark_read = stage, mark_read
        return store

    @hookimpl(wrapper=True)
    def commit_slot(self, staging: Staging) -> Iterator[None]:
        commit = yield
        self.busy.discard(staging.slot)
        return commit


def test_a_slot_on_its_way_is_not_told_to_be_read(written: checkpoint_files.Written) -> None:
    exclusive = ExclusiveStore()
    with open_streamer(written, observers=[exclusive]) as streamer:
        streamer.acquire(0, [1, 2], wait=False).release(stream=5)
        steps = streamer.rounds(1, range(EXPERTS), [1] * EXPERTS, stream=5)
        next(steps)
        steps.close()
        streamer.acquire(2, [3], stream=5).release(stream=5)
    assert exclusive.clashes == []


def test_an_expert_named_twice_needs_one_slot(written: checkpoint_files.Written) -> None:
    with open_streamer(written, smallest(written)) as streamer, streamer.acquire(3, [1, 1, 1]) as lease:
        assert len(set(lease.slots.tolist())) == 1
        assert_holds(lease, written, 3, [1, 1, 1])


def test_a_wrong_number_in_rounds_leaves_no_mark(written: checkpoint_files.Written) -> None:
    with open_streamer(written) as streamer:
        streamer.acquire(0, [1, 2]).release()
        with pytest.raises(UsageError, match="which has 0 to 7"):
            next(streamer.rounds(0, [1, 2, 99], [1, 1, 1]))
        assert not streamer._tables.turn.any()


def test_ready_experts_can_be_seen_while_others_are_loaded_or_failed(written: checkpoint_files.Written) -> None:
    checkpoint = open_checkpoint(written.path)
    bad = int(checkpoint.layers[0].parts[0].offsets[2]) // 4096 * 4096

    def open_file(path: Path, direct: bool) -> RawFile:
        return FaultyFile(open_raw_file(path, direct), lambda offset: offset == bad)

    with open_streamer(written, open_file=open_file) as streamer:
        streamer.acquire(0, [5]).release()
        with streamer.acquire(0, [2, 5, 6], wait=False) as lease:
            assert_part_holds(lease, 1, written, 0, 5)
            with pytest.raises(ReadFailed):
                lease.wait()
            for position, expert in ((1, 5), (2, 6)):
                assert_part_holds(lease, position, written, 0, expert)
            with pytest.raises(ReadFailed):
                lease.view(0)


def test_what_a_plugin_raises_to_end_the_process_ends_only_its_fill(written: checkpoint_files.Written) -> None:
    class Exits:
        """Wants to end the process, once."""

        calls = 0

        @hookimpl(wrapper=True)
        def commit_slot(self) -> Iterator[None]:
            self.calls += 1
            if self.calls == 1:
                raise SystemExit(3)
            return (yield)

    with open_streamer(written, observers=[Exits()]) as streamer:
        with pytest.raises(BackendContractError, match="SystemExit"):
            streamer.acquire(0, [1])
        with streamer.acquire(0, [1]) as lease:
            assert_holds(lease, written, 0, [1])


def test_views_are_refused_before_the_wait_and_after_the_release(written: checkpoint_files.Written) -> None:
    with open_streamer(written) as streamer:
        lease = streamer.acquire(2, [5], wait=False)
        with pytest.raises(UsageError, match="still being loaded"):
            lease.view(0)
        lease.wait()
        assert_holds(lease, written, 2, [5])
        lease.release()
        lease.release()
        with pytest.raises(UsageError, match="has ended"):
            lease.view(0)


@pytest.mark.parametrize(
    "experts",
    [np.arange(6)[::3], np.array([0, 3], np.int32), (0, 3), np.array([0, 3])],
    ids=["strided", "int32", "tuple", "own"],
)
def test_experts_may_come_in_any_kind_of_row(written: checkpoint_files.Written, experts: Sequence[int]) -> None:
    before = len(residency.lease.signatures)
    with open_streamer(written) as streamer, streamer.acquire(0, experts) as lease:
        assert_holds(lease, written, 0, [0, 3])
    assert len(residency.lease.signatures) == max(before, 1)  # nothing was compiled for it


@pytest.mark.parametrize("experts", [[[0, 1]], 3, list(range(9))])
def test_what_is_no_row_of_experts_is_refused(written: checkpoint_files.Written, experts: object) -> None:
    with open_streamer(written) as streamer, pytest.raises(UsageError, match="up to 8 numbers in a row"):
        streamer.acquire(0, experts)  # type: ignore[arg-type]  # wrong on purpose


def test_a_pass_over_no_token_is_refused(written: checkpoint_files.Written) -> None:
    with open_streamer(written) as streamer, pytest.raises(UsageError, match="at least 1"):
        streamer.begin_pass(0)


def test_a_readable_slot_under_lease_is_never_a_victim(written: checkpoint_files.Written) -> None:
    with open_streamer(written, smallest(written)) as streamer, streamer.acquire(3, [0]) as held:
        for expert in range(1, EXPERTS):
            with streamer.acquire(3, [expert]) as other:
                assert other.slots.tolist() != held.slots.tolist()
            assert_holds(held, written, 3, [0])


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


def test_a_failed_read_reaches_everyone_who_waits_for_the_expert(written: checkpoint_files.Written) -> None:
    checkpoint = open_checkpoint(written.path)
    bad = int(checkpoint.layers[0].parts[0].offsets[2]) // 4096 * 4096

    def open_file(path: Path, direct: bool) -> RawFile:
        return FaultyFile(open_raw_file(path, direct), lambda offset: offset == bad)

    with open_streamer(written, open_file=open_file) as streamer:
        first = streamer.acquire(0, [2], wait=False)
        second = streamer.acquire(0, [2, 3], wait=False)
        for lease in (first, second):
            with pytest.raises(ReadFailed, match="EIO"):
                lease.wait()
        first.release()
        second.release()
        assert streamer.counters.expert_bytes_read == 55_296  # of the other one: what failed was not read
        assert not streamer._tables.leases.any()


@pytest.mark.parametrize("where", ["prepare", "start", "cancelled", "wait", "step", "load"])
def test_an_interrupt_leaves_no_lease_and_no_slot_with_two_writers(
    written: checkpoint_files.Written, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_streamer(written, smallest(written)) as streamer:
        filler = streamer._filler
        assert filler is not None
        target, name = {
            "prepare": (filler, "prepare"),
            "start": (filler, "start"),  # after they were queued
            "cancelled": (filler, "start"),
            "wait": (Ticket, "wait"),
            "step": (streamer._policy, "layer_step"),  # after everything was leased
            "load": (streamer, "_load"),
        }[where]
        real = getattr(target, name)

        def interrupted(*arguments: object, **options: object) -> object:
            if where in ("start", "step"):
                real(*arguments, **options)
            raise KeyboardInterrupt

        for _ in range(5):
            with monkeypatch.context() as patch:
                patch.setattr(target, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    streamer.acquire(0, [1, 2])
            assert not streamer._tables.leases.any()
        for layer in range(4):
            for experts in ([1, 2], [3, 4], [0, 7]):
                with streamer.acquire(layer, experts) as lease:
                    assert_holds(lease, written, layer, experts)
        assert not streamer._loads


def test_a_file_that_is_written_to_in_place_gives_no_expert_any_more(written: checkpoint_files.Written) -> None:
    with open_streamer(written) as streamer:
        path = streamer._filler._files[0].path  # type: ignore[union-attr]  # it is open
        with streamer.acquire(0, [1, 2]) as lease:
            with path.open("r+b") as file:
                file.write(file.read(1))  # nothing is other than before, but who could know
            os.utime(path, ns=(0, 1))  # within the clock tick of the file's making, its time may be the old one
            with pytest.raises(CheckpointError, match=rf"{path}: it was written to since .* 1 ns now"):
                streamer.acquire(1, [3])
            assert_holds(lease, written, 0, [1, 2])
        with streamer.acquire(0, [2, 1]) as lease:  # what arrived before is of use
            assert_holds(lease, written, 0, [2, 1])


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_removed_or_replaced_is_read_on_as_it_was(
    written: checkpoint_files.Written, replaced: bool
) -> None:
    with open_streamer(written, smallest(written)) as streamer:
        for path in open_checkpoint(written.path).files:
            if replaced:
                other = path.with_suffix(".other")
                other.write_bytes(bytes(path.stat().st_size))
                other.replace(path)
            else:
                path.unlink()
        for layer in range(4):
            with streamer.acquire(layer, [1, 2]) as lease:
                assert_holds(lease, written, layer, [1, 2])


def test_a_slot_whose_read_returned_too_late_is_taken_back(
    written: checkpoint_files.Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(GatedFile, "armed", False)

    def open_file(path: Path, direct: bool) -> RawFile:
        return GatedFile(open_raw_file(path, direct), gate)

    with open_streamer(written, smallest(written), open_file=open_file, read_timeout_s=0.2) as streamer:
        GatedFile.armed = True
        with pytest.raises(ReadFailed, match="has not answered"):
            streamer.acquire(3, [0])
        assert (streamer._tables.state == residency.QUARANTINED).sum() == 1
        with pytest.raises(UsageError, match="1 lost to reads that never returned"):
            streamer.acquire(3, [1, 2])
        gate.set()
        GatedFile.armed = False
        slot = next(iter(streamer._loads))
        while streamer._loads[slot].ticket.abandoned:
            threading.Event().wait(0.01)
        with streamer.acquire(3, [1, 2]) as lease:
            assert_holds(lease, written, 3, [1, 2])


class LateCommits:
    """A wrapper that keeps the bytes from everyone, however long, until the test lets them land."""

    def __init__(self) -> None:
        self.landed = threading.Event()
        self.ordered_before: list[int] = []

    @hookimpl(wrapper=True)
    def commit_slot(self) -> Iterator[None]:
        yield
        return self

    def done(self) -> bool:
        return self.landed.is_set()

    def wait(self) -> None:
        assert self.landed.wait(60)

    def order_before(self, stream: int) -> None:
        self.ordered_before.append(stream)


def test_a_commit_that_one_stream_waits_for_is_waited_for_by_the_next_stream_too(
    written: checkpoint_files.Written,
) -> None:
    commits = LateCommits()
    with open_streamer(written, observers=[commits]) as streamer:
        streamer.acquire(0, [1], stream=7).release(stream=7)
        second = streamer.acquire(0, [1], wait=False)
        assert second.pending.tolist() == [0]  # ordered before stream 7 is not readable by everybody
        second.wait(stream=9)
        assert commits.ordered_before == [7, 9]
        second.release(stream=9)
        commits.landed.set()
        with streamer.acquire(0, [1], wait=False) as third:
            assert third.ready.tolist() == [0]
            assert_holds(third, written, 0, [1])
        assert streamer.counters.misses == 1


def test_a_commit_that_does_not_end_is_given_up_and_its_slot_kept_away_until_it_does(
    written: checkpoint_files.Written,
) -> None:
    commits = LateCommits()
    with open_streamer(written, observers=[commits], read_timeout_s=0.2) as streamer:
        with pytest.raises(MachineError, match=r"a commit has not ended for 0\.2 s") as failure:
            streamer.acquire(0, [1])
        assert any("in slot 0, which backend 'memory' was to commit" in note for note in failure.value.__notes__)
        assert streamer._tables.state[0] == residency.QUARANTINED
        commits.landed.set()
        with streamer.acquire(0, [1]) as lease:
            assert_holds(lease, written, 0, [1])
        assert streamer._tables.state[0] != residency.QUARANTINED
        assert not streamer._tables.leases.any()


def test_closing_leaves_a_store_behind_whose_commit_or_close_does_not_end(written: checkpoint_files.Written) -> None:
    commits = LateCommits()
    with capture_logs() as events:
        streamer = open_streamer(written, observers=[commits], read_timeout_s=0.2)
        with pytest.raises(MachineError):
            streamer.acquire(0, [1])
        closing = threading.Event()
        store = streamer._classes[1][0]
        store.close = closing.wait  # type: ignore[method-assign]  # it waits for a device that does not answer
        streamer.close()
        streamer.close()
    reasons = [event["reason"] for event in events if event["event"] == "store_left_open"]
    written_to = "a read or copy that never ended may still write to it"
    assert reasons == [written_to, "closing it has not ended for 0.2 s", written_to]  # the second one still closes
    commits.landed.set()
    closing.set()


def test_a_lease_that_the_garbage_collector_ends_inside_a_close_does_not_hold_it_up(
    written: checkpoint_files.Written,
) -> None:
    streamer = open_streamer(written, read_timeout_s=20)
    cycle: list[object] = [streamer.acquire(0, [1])]
    cycle.append(cycle)
    del cycle
    store = streamer._classes[0][0]
    close, ended = store.close, threading.Event()

    def collect_and_close() -> None:
        gc.collect()
        close()
        ended.set()

    store.close = collect_and_close  # type: ignore[method-assign]  # the collector may run anywhere
    with capture_logs() as events:
        streamer.close()
    assert ended.is_set()
    assert events == []


def test_a_commit_that_fails_behind_a_streams_back_is_raised_before_its_results_are_used(
    written: checkpoint_files.Written,
) -> None:
    class FailsLate(LateCommits):
        """Says later that the bytes never arrived."""

        def done(self) -> bool:
            if self.landed.is_set():
                raise CommitFailed("the copy was lost")
            return False

    commits = FailsLate()
    with open_streamer(written, observers=[commits]) as streamer:
        with streamer.acquire(0, [1], stream=7):
            streamer.raise_late_failure()  # not known yet
        commits.landed.set()
        with pytest.raises(CommitFailed, match="lost"):
            streamer.raise_late_failure()
        streamer.raise_late_failure()  # once
        assert not streamer._loads
        assert streamer._tables.state[0] == residency.EMPTY


def test_a_step_that_the_garbage_collector_ends_inside_another_one_does_not_hang(
    written: checkpoint_files.Written,
) -> None:
    with open_streamer(written, "50%") as streamer:
        real_reap = streamer._reap
        for _ in range(20):
            steps = streamer.rounds(0, range(EXPERTS), [1] * EXPERTS)
            next(steps)
            cycle = [steps]
            cycle.append(cycle)  # type: ignore[arg-type]  # so that the collector alone can end it
            del steps, cycle

            def reap_and_collect() -> None:
                real_reap()
                gc.collect()

            streamer._reap = reap_and_collect  # type: ignore[method-assign]  # under the lock
            with streamer.acquire(1, [2, 3]) as lease:
                assert_holds(lease, written, 1, [2, 3])
            streamer._reap = real_reap  # type: ignore[method-assign]  # as it was
        assert not streamer._tables.leases.any()


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
    with pytest.raises(StoreClosed):
        lease.view(0)
    lease.release()
    with pytest.raises(StoreClosed):
        streamer.acquire(0, [0])


@pytest.mark.usefixtures("no_thread_stays")
def test_two_threads_that_close_at_once_close_everything_once(written: checkpoint_files.Written) -> None:
    closing, again = threading.Event(), threading.Event()
    closed: list[RawFile] = []

    class SlowToClose:
        """A real file that is being closed until another close of it begins, or half a second has passed."""

        def __init__(self, path: Path, direct: bool) -> None:
            self._raw = open_raw_file(path, direct)

        def pread_into(self, buffer: memoryview, offset: int) -> int:
            return self._raw.pread_into(buffer, offset)

        def close(self) -> None:
            closed.append(self)
            if closing.is_set():
                again.set()
            closing.set()
            again.wait(0.5)
            self._raw.close()

    streamer = open_streamer(written, open_file=SlowToClose)
    errors: list[OSError] = []

    def close() -> None:
        try:
            streamer.close()
        except OSError as error:
            errors.append(error)

    first, second = threading.Thread(target=close), threading.Thread(target=close)
    first.start()
    closing.wait()
    second.start()
    first.join()
    second.join()
    assert errors == []
    assert len(closed) == len(set(map(id, closed))) > 1


def test_a_close_without_a_thread_to_be_had_still_closes_and_says_that_nothing_limits_it(
    written: checkpoint_files.Written, refuse_thread: Callable[[str], None]
) -> None:
    streamer = open_streamer(written)
    refuse_thread("limited call")
    with capture_logs() as events:
        streamer.close()
    assert {event["reason"] for event in events if event["event"] == "no_time_limit"} == {
        "no thread could be started: can't start new thread"
    }
    for store, _ in streamer._classes:
        with pytest.raises(StoreClosed):
            store.device_view(0)


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
                raise DeviceOutOfMemory("no second store")
            store = yield
            real_close = store.close
            store.close = lambda: (closed.append(1), real_close())
            return store

    with pytest.raises(DeviceOutOfMemory):
        open_streamer(written, observers=[FailSecond()])
    assert closed == [1]


@pytest.mark.usefixtures("no_thread_stays")
@pytest.mark.parametrize("change", ["replaced", "written to", "shortened", "gone"])
def test_a_file_that_changed_since_it_was_indexed_is_refused(written: checkpoint_files.Written, change: str) -> None:
    checkpoint = open_checkpoint(written.path)
    backend = open_backend(memory_backend.NAME)
    plan = make_plan(checkpoint, NO_DEMAND, MemoryRequest.parse("all"), backend, available_memory())
    shard = written.files[1]
    match change:
        case "replaced":
            other = shard.with_suffix(".new")
            other.write_bytes(bytes(shard.stat().st_size))
            other.replace(shard)
        case "written to":
            with shard.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"x")
            os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
        case "shortened":
            os.truncate(shard, shard.stat().st_size - 1)
        case "gone":
            shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        ExpertStreamer(checkpoint, plan, backend)


def test_seeding_loads_what_the_backend_chooses(written: checkpoint_files.Written) -> None:
    class Choose:
        """A backend's own mind about seeding, as a wrapper."""

        @hookimpl(wrapper=True)
        def seed_experts(self, hottest: Sequence[ExpertKey]) -> Iterator[None]:
            yield
            return list(hottest)[1:2]

    keys = {ExpertKey(0, 4): 4.0, ExpertKey(0, 6): 3.0, ExpertKey(3, 1): 2.0, ExpertKey(3, 2): 1.0}
    with open_streamer(written, "50%") as streamer:
        assert streamer.seed(keys) == 4
        assert streamer.seed(keys) == 0
        with streamer.acquire(0, [4, 6]) as lease:
            assert_holds(lease, written, 0, [4, 6])
        with streamer.acquire(3, [2, 1]) as lease:
            assert_holds(lease, written, 3, [2, 1])
        assert streamer.counters.hits == 4
        assert streamer.counters.misses == 0
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
        streamer.seed({ExpertKey(0, 1): 1.0})


@pytest.mark.parametrize("policy", policy_names())
def test_the_hottest_are_ranked_by_use(written: checkpoint_files.Written, policy: str) -> None:
    with open_streamer(written, "50%", policy=policy) as streamer:
        assert streamer.hottest() == {}
        for layer, experts in ((1, [3, 4]), (0, [5, 6]), (1, [4, 3]), (3, [0, 1]), (1, [4, 2])):
            streamer.begin_pass(1)
            streamer.acquire(layer, experts).release()
        hottest = streamer.hottest()
        assert len(hottest) == 7
        if policy == "hotness":
            assert list(hottest.values()) == [3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]
            assert list(hottest)[:3] == [ExpertKey(1, 4), ExpertKey(1, 3), ExpertKey(1, 2)]
        else:
            assert set(list(hottest)[:2]) == {ExpertKey(1, 4), ExpertKey(1, 2)}
            assert set(list(hottest)[2:4]) == {ExpertKey(3, 0), ExpertKey(3, 1)}


@pytest.mark.parametrize("policy", policy_names())
def test_a_seeded_streamer_begins_where_the_earlier_one_ended(written: checkpoint_files.Written, policy: str) -> None:
    steps = [(0, [1, 2]), (1, [3, 4]), (3, [5, 6])]
    with open_streamer(written, "50%", policy=policy) as streamer:
        for _ in range(3):
            streamer.begin_pass(1)
            for layer, experts in steps:
                streamer.acquire(layer, experts).release()
        hottest = streamer.hottest()
    with open_streamer(written, "50%", policy=policy) as streamer:
        streamer.seed(hottest)
        assert list(streamer.hottest()) == list(hottest)
        for layer, experts in steps:
            with streamer.acquire(layer, experts) as lease:
                assert_holds(lease, written, layer, experts)
        assert streamer.counters.misses == 0


def test_a_hot_seed_stays_while_others_come_and_go(written: checkpoint_files.Written) -> None:
    with open_streamer(written, smallest(written)) as streamer:  # two slots for layer 3
        assert streamer.seed({ExpertKey(3, 5): 7.0}) == 1
        streamer.begin_pass(1)
        for expert in (0, 1, 2, 0, 3):
            streamer.acquire(3, [expert]).release()
        streamer.acquire(3, [5]).release()
        assert streamer.counters.hits == 1


def test_seeding_reads_in_file_order_and_tells_how_far_it_is(written: checkpoint_files.Written) -> None:
    order: list[tuple[str, int]] = []

    class RecordingFile:
        """A real file that notes where it is read."""

        def __init__(self, path: Path, file: RawFile) -> None:
            self._path, self._file = path, file

        def pread_into(self, buffer: memoryview, offset: int) -> int:
            order.append((self._path.name, offset))
            return self._file.pread_into(buffer, offset)

        def close(self) -> None:
            self._file.close()

    def open_file(path: Path, direct: bool) -> RawFile:
        return RecordingFile(path, open_raw_file(path, direct))

    gates = [
        (written.files[file].name, range(offset, offset + length))
        for tensor, (file, offset, length) in written.places.items()
        if "gate_exps" in tensor
    ]
    shuffled = np.random.default_rng(11).permutation(4 * EXPERTS).tolist()
    scores = {ExpertKey(*divmod(number, EXPERTS)): float(100 - place) for place, number in enumerate(shuffled)}
    with open_streamer(written, "all", open_file=open_file, filler_threads=1, io_mode="buffered") as streamer:
        order.clear()
        told: list[tuple[int, int]] = []
        assert streamer.seed(scores, lambda done, total: told.append((done, total))) == 4 * EXPERTS
        assert streamer.counters.steps == 0
        assert streamer.counters.expert_bytes_read == told[-1][0]
    read = [(file, offset) for file, offset in order if any(file == name and offset in room for name, room in gates)]
    assert len(read) == 4 * EXPERTS
    assert read == sorted(read)
    total_bytes = sum(len(written.expert_bytes(layer, expert)) for layer in range(4) for expert in range(EXPERTS))
    assert told[-1] == (total_bytes, total_bytes)
    assert len(told) == 4 * EXPERTS, "in small steps"
    assert told == sorted(set(told))
