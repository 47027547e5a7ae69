"""Promises of the pool: every byte, each lease ended once, no deadlock, no thread left, errors reach who waits."""

import ctypes
import errno
import hashlib
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import structlog
from structlog.testing import LogCapture

from expertstream.errors import (
    BackendContractError,
    CheckpointError,
    CommitFailed,
    ConfigError,
    MachineError,
    ReadFailed,
    UsageError,
)
from expertstream.filler import Fill, Filler, PartRead, RawFile, Ticket, open_raw_file
from expertstream.slots import READY, Commit, ExpertKey, SlotLayout, SlotPart, SlotStore, Staging

pytestmark = pytest.mark.timeout(60)

BLOCK = 4096
PART_BYTES = {"gate": 9000, "up": 9000, "down": 13_001}
LAYOUT = SlotLayout((SlotPart("gate", 0, 16384), SlotPart("up", 16384, 16384), SlotPart("down", 32768, 20480)))
FILE_COUNT, EXPERTS_PER_FILE = 3, 8
FIRST_OFFSET = 1000


class MemoryStore:
    """Slots in one page-aligned mapping. Leases end once, or the test fails at `close`."""

    def __init__(self, slot_count: int, layout: SlotLayout = LAYOUT) -> None:
        self.slot_count = slot_count
        self.layout = layout
        self.memory = mmap.mmap(-1, slot_count * layout.slot_bytes)
        self.leased: dict[int, Staging] = {}
        self.lock = threading.Lock()
        self.staged_count = self.committed_count = self.discarded_count = 0
        self.broken_promises: list[str] = []

    def stage(self, slot: int) -> Staging:
        begin = slot * self.layout.slot_bytes
        staging = Staging(slot, memoryview(self.memory)[begin : begin + self.layout.slot_bytes])
        self.lease(staging)
        return staging

    def lease(self, staging: Staging) -> None:
        with self.lock:
            if staging.slot in self.leased:
                self.broken_promises.append(f"slot {staging.slot} was staged twice")
            self.leased[staging.slot] = staging
            self.staged_count += 1

    def end(self, staging: Staging) -> None:
        with self.lock:
            if self.leased.pop(staging.slot, None) is not staging:
                self.broken_promises.append(f"the lease of slot {staging.slot} ended twice")

    def commit(self, staging: Staging) -> Commit:
        self.committed_count += 1
        self.end(staging)
        return READY

    def discard(self, staging: Staging) -> None:
        self.discarded_count += 1
        self.end(staging)

    def mark_read(self, slot: int, stream: int) -> None:
        raise NotImplementedError

    def device_view(self, slot: int) -> object:
        raise NotImplementedError

    def read_back(self, slot: int) -> bytes:
        begin = slot * self.layout.slot_bytes
        return self.memory[begin : begin + self.layout.slot_bytes]

    def close(self) -> None:
        assert self.broken_promises == []
        assert self.leased == {}
        self.memory.close()  # BufferError if anybody still holds a view


class StarvedStore(MemoryStore):
    """Few staging buffers: `stage` blocks until one is free, and a slow copy thread frees them after the commit."""

    def __init__(self, slot_count: int, buffer_count: int) -> None:
        super().__init__(slot_count)
        self.free = [mmap.mmap(-1, LAYOUT.slot_bytes) for _ in range(buffer_count)]
        self.freed = threading.Condition()
        self.buffer_of: dict[Staging, mmap.mmap] = {}
        self.copies: list[threading.Thread] = []

    def stage(self, slot: int) -> Staging:
        with self.freed:
            assert self.freed.wait_for(lambda: self.free, timeout=30)
            buffer = self.free.pop()
            staging = Staging(slot, memoryview(buffer))
            self.buffer_of[staging] = buffer
        self.lease(staging)
        return staging

    def commit(self, staging: Staging) -> Commit:
        super().commit(staging)
        copy = threading.Thread(target=self._copy, args=(staging,))
        self.copies.append(copy)
        copy.start()
        return READY

    def discard(self, staging: Staging) -> None:
        super().discard(staging)
        self._give_back(staging)

    def _copy(self, staging: Staging) -> None:
        begin = staging.slot * LAYOUT.slot_bytes
        for position in range(0, LAYOUT.slot_bytes, BLOCK):
            self.memory[begin + position : begin + position + BLOCK] = staging.view[position : position + BLOCK]
            os.sched_yield()
        self._give_back(staging)

    def _give_back(self, staging: Staging) -> None:
        with self.freed:
            self.free.append(self.buffer_of.pop(staging))
            self.freed.notify()


def commit(store: SlotStore, staging: Staging) -> Commit:
    assert isinstance(store, MemoryStore)
    return store.commit(staging)


def telling_bytes(file: int, expert: int, part: str) -> bytes:
    return hashlib.shake_128(f"{file}/{expert}/{part}".encode()).digest(PART_BYTES[part])


def file_content(file: int) -> bytes:
    experts = [telling_bytes(file, expert, part) for part in PART_BYTES for expert in range(EXPERTS_PER_FILE)]
    return b"\xee" * FIRST_OFFSET + b"".join(experts)


def offset_of(expert: int, part: str) -> int:
    names = list(PART_BYTES)
    before = sum(PART_BYTES[name] * EXPERTS_PER_FILE for name in names[: names.index(part)])
    return FIRST_OFFSET + before + expert * PART_BYTES[part]


def fill(store: MemoryStore, slot: int, file: int, expert: int) -> Fill:
    reads = []
    for room in LAYOUT.parts:
        offset = offset_of(expert, room.name)
        position = room.offset + offset % BLOCK
        reads.append(PartRead(file, offset, PART_BYTES[room.name], position, room.offset, room.room_bytes))
    return Fill(store, slot, tuple(reads), ExpertKey(file, expert))


def all_fills(store: MemoryStore) -> list[Fill]:
    return [fill(store, slot, *divmod(slot, EXPERTS_PER_FILE)) for slot in range(FILE_COUNT * EXPERTS_PER_FILE)]


def holds(store: MemoryStore, slot: int, file: int, expert: int) -> bool:
    slot_bytes = store.read_back(slot)
    return all(
        slot_bytes[room.offset + offset_of(expert, room.name) % BLOCK :].startswith(
            telling_bytes(file, expert, room.name)
        )
        for room in LAYOUT.parts
    )


Answer = Callable[[int, memoryview, int], int | None]
"""Of a file number, a buffer and an offset: None to read as asked, or what else the read answers."""


class Shards:
    """Three fake files, strict about alignment where they are direct; `answer` may do otherwise than asked."""

    paths = tuple(Path(f"shard-{number + 1:05}-of-00003") for number in range(FILE_COUNT))
    contents = tuple(file_content(number) for number in range(FILE_COUNT))

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer
        self.is_probed = False
        self.open_count = 0

    def __call__(self, path: Path, direct: bool) -> RawFile:
        self.open_count += 1
        return _Shard(self, self.paths.index(path), direct)

    def filler(self, **options: Any) -> Filler:
        filler = Filler(self.paths, commit, open_file=self, **options)
        self.is_probed = True
        return filler


class _Shard:
    def __init__(self, shards: Shards, number: int, direct: bool) -> None:
        self.shards, self.number, self.direct = shards, number, direct
        self.is_closed = False

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        assert not self.is_closed
        if self.shards.is_probed and self.shards.answer is not None:
            answer = self.shards.answer(self.number, buffer, offset)
            if answer is not None:
                return answer
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        if self.direct and (address % BLOCK or offset % BLOCK or len(buffer) % BLOCK):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        piece = self.shards.contents[self.number][offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.shards.open_count -= 1


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert [thread for thread in threading.enumerate() if thread not in before] == []


@pytest.fixture
def log() -> Iterator[list[dict[str, Any]]]:
    capture = LogCapture()
    structlog.configure(processors=[capture])
    yield capture.entries  # type: ignore[misc]  # structlog's entries are mutable mappings, read here as dicts
    structlog.reset_defaults()


@pytest.mark.parametrize("io_mode", ["auto", "buffered"])
def test_every_byte_equals_the_files(io_mode: str, tmp_path: Path) -> None:
    paths = [tmp_path / path for path in Shards.paths]
    for path, content in zip(paths, Shards.contents, strict=True):
        path.write_bytes(content)
    store = MemoryStore(FILE_COUNT * EXPERTS_PER_FILE)
    with Filler(paths, commit, thread_count=8, io_mode=io_mode) as filler:  # type: ignore[arg-type]  # parametrized
        fills = all_fills(store)
        for ticket in filler.submit(fills):
            assert ticket.wait() is READY
            assert ticket.done()
            assert ticket.error is None
        assert filler.bytes_read == len(fills) * sum(PART_BYTES.values())
        assert filler.io_mode in ("direct", "buffered")
        assert io_mode == "auto" or filler.io_mode == io_mode
    assert all(holds(store, slot, *divmod(slot, EXPERTS_PER_FILE)) for slot in range(store.slot_count))
    assert store.committed_count == store.slot_count
    store.close()


@pytest.mark.parametrize("thread_count", [1, 2, 8])
@pytest.mark.parametrize("buffer_count", [1, 2])
def test_few_staging_buffers_cannot_halt_the_filler(buffer_count: int, thread_count: int) -> None:
    store = StarvedStore(FILE_COUNT * EXPERTS_PER_FILE, buffer_count)

    def answer(file: int, buffer: memoryview, offset: int) -> int | None:
        if file == 1 and offset // BLOCK % 5 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return None

    with Shards(answer).filler(thread_count=thread_count) as filler:
        tickets = filler.submit(all_fills(store)[:12])
        tickets += filler.submit(all_fills(store)[12:])
        failed = set()
        for slot, ticket in enumerate(tickets):
            try:
                ticket.wait()
            except ReadFailed:
                failed.add(slot)
    for copy in store.copies:
        copy.join()
    assert failed
    assert all(slot // EXPERTS_PER_FILE == 1 for slot in failed)
    for slot in set(range(store.slot_count)) - failed:
        assert holds(store, slot, *divmod(slot, EXPERTS_PER_FILE))
    assert (store.committed_count, store.discarded_count) == (store.slot_count - len(failed), len(failed))
    assert len(store.free) == buffer_count
    store.close()


def test_closing_a_starved_filler_gives_every_buffer_back() -> None:
    store, reading, go_on = StarvedStore(FILE_COUNT * EXPERTS_PER_FILE, 2), threading.Event(), threading.Event()

    def answer(file: int, buffer: memoryview, offset: int) -> None:
        reading.set()
        assert go_on.wait(30)

    filler = Shards(answer).filler(thread_count=4)
    tickets = filler.submit(all_fills(store))
    assert reading.wait(30)
    closing = threading.Thread(target=filler.close)
    closing.start()
    with pytest.raises(UsageError, match=r"ExpertKey.* was not read before the filler closed"):
        tickets[-1].wait()
    go_on.set()
    closing.join()
    assert all(ticket.done() and not ticket.abandoned for ticket in tickets)
    for copy in store.copies:
        copy.join()
    assert len(store.free) == 2
    store.close()


def test_a_thread_that_cannot_be_started_is_the_machines_fault_and_leaves_nothing(
    refuse_thread: Callable[[str], None],
) -> None:
    refuse_thread("filler-2")
    shards = Shards()
    with pytest.raises(
        MachineError,
        match=r"filler thread 3 of 8 .*can't start new thread.* fewer .*ulimit -u.*ulimit -v",
    ):
        shards.filler(thread_count=8)
    assert shards.open_count == 0


def test_idle_threads_share_the_parts_of_one_fill() -> None:
    store, together = MemoryStore(1), threading.Barrier(3)

    def answer(file: int, buffer: memoryview, offset: int) -> None:
        together.wait(30)  # passes only when three reads are under way at once

    with Shards(answer).filler(thread_count=3) as filler:
        filler.submit([fill(store, 0, 1, 3)])[0].wait()
    assert holds(store, 0, 1, 3)
    store.close()


def test_fills_are_read_in_the_order_of_submission() -> None:
    store, offsets = MemoryStore(6), list[tuple[int, int]]()

    def answer(file: int, buffer: memoryview, offset: int) -> None:
        offsets.append((file, offset))

    order = [(2, 5), (0, 1), (1, 7), (2, 0), (0, 0), (1, 1)]
    with Shards(answer).filler(thread_count=1) as filler:
        for ticket in filler.submit([fill(store, slot, *expert) for slot, expert in enumerate(order)]):
            ticket.wait()
    assert offsets == [
        (file, offset_of(expert, part) // BLOCK * BLOCK) for file, expert in order for part in PART_BYTES
    ]
    store.close()


def test_a_storage_error_fails_its_expert_and_no_other() -> None:
    store = MemoryStore(FILE_COUNT * EXPERTS_PER_FILE)
    bad_offset, is_bad = offset_of(5, "up"), True

    def answer(file: int, buffer: memoryview, offset: int) -> None:
        if is_bad and file == 1 and offset == bad_offset // BLOCK * BLOCK:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Shards(answer).filler() as filler:
        tickets = filler.submit(all_fills(store))
        bad_slot = EXPERTS_PER_FILE + 5
        for slot, ticket in enumerate(tickets):
            if slot != bad_slot:
                ticket.wait()
                assert holds(store, slot, *divmod(slot, EXPERTS_PER_FILE))
        with pytest.raises(ReadFailed) as failure:
            tickets[bad_slot].wait()
        assert str(failure.value) == (
            f"reading {Shards.paths[1]} at offset {bad_offset}, 9000 bytes wanted, 0 read: Input/output error (EIO): "
            "the storage failed; this does not mean that the file is damaged"
        )
        assert failure.value.__notes__ == [f"while filling slot {bad_slot} with ExpertKey(layer=1, expert=5)"]
        assert tickets[bad_slot].error is failure.value
        assert tickets[bad_slot].done()
        assert not tickets[bad_slot].abandoned
        is_bad = False
        filler.submit([fill(store, bad_slot, 1, 5)])[0].wait()
    assert holds(store, bad_slot, 1, 5)
    assert store.discarded_count == 1
    store.close()


def _no_bytes(file: int, buffer: memoryview, offset: int) -> int:
    return 0


def _storage_error(file: int, buffer: memoryview, offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _bug_of_the_layer(file: int, buffer: memoryview, offset: int) -> int:
    raise ZeroDivisionError("not an OSError")


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [(_no_bytes, ReadFailed), (_storage_error, ReadFailed), (_bug_of_the_layer, ZeroDivisionError)],
)
@pytest.mark.parametrize("thread_count", [1, 8])
def test_failures_lose_no_slot(trouble: Answer, expected: type[Exception], thread_count: int) -> None:
    store, shards = MemoryStore(2), Shards(trouble)
    with shards.filler(thread_count=thread_count) as filler:
        for attempt in range(1, 11):
            for ticket in filler.submit([fill(store, slot, 0, slot) for slot in range(2)]):
                with pytest.raises(expected):
                    ticket.wait()
                assert store.leased.get(ticket is None) is None
            assert store.discarded_count == store.staged_count == 2 * attempt
        assert store.committed_count == filler.bytes_read == 0
        shards.answer = None
        for ticket in filler.submit([fill(store, slot, 0, slot) for slot in range(2)]):
            ticket.wait()
    assert holds(store, 0, 0, 0)
    assert holds(store, 1, 0, 1)
    store.close()


def test_an_error_that_is_kept_keeps_no_view_of_a_slot() -> None:
    store = MemoryStore(1)
    with Shards(_storage_error).filler() as filler:
        ticket = filler.submit([fill(store, 0, 0, 0)])[0]
        with pytest.raises(ReadFailed) as kept:
            ticket.wait()
    del filler
    store.close()  # BufferError otherwise
    assert kept.value.__cause__ is not None


def test_what_stage_raises_reaches_the_ticket() -> None:
    class NoStaging(MemoryStore):
        def stage(self, slot: int) -> Staging:
            raise IndexError(f"slot {slot} of 1")

    broken, whole = NoStaging(1), MemoryStore(1)
    with Shards().filler() as filler:
        failing, working = filler.submit([fill(broken, 0, 0, 0), fill(whole, 0, 0, 0)])
        with pytest.raises(IndexError, match="slot 0 of 1"):
            failing.wait()
        working.wait()
    assert broken.discarded_count == 0
    whole.close()


def test_a_commit_that_raises_has_ended_the_lease() -> None:
    class NoCommit(MemoryStore):
        def commit(self, staging: Staging) -> Commit:
            super().commit(staging)
            raise CommitFailed("the device said no")

    store = NoCommit(1)
    with Shards().filler() as filler:
        ticket = filler.submit([fill(store, 0, 0, 0)])[0]
        with pytest.raises(CommitFailed, match="the device said no"):
            ticket.wait()
    assert (store.committed_count, store.discarded_count) == (1, 0)
    store.close()


def test_a_discard_that_raises_does_not_hide_the_read_error() -> None:
    class NoDiscard(MemoryStore):
        def discard(self, staging: Staging) -> None:
            super().discard(staging)
            raise RuntimeError("the store is confused")

    store = NoDiscard(1)
    with Shards(_storage_error).filler() as filler:
        ticket = filler.submit([fill(store, 0, 0, 0)])[0]
        with pytest.raises(ReadFailed) as failure:
            ticket.wait()
    assert failure.value.__notes__[-1] == "and then: RuntimeError: the store is confused"
    store.close()


@pytest.mark.parametrize("wrong", ["misaligned", "short", "read-only", "other slot"])
def test_a_lease_that_no_direct_read_can_fill_is_the_backends_fault(wrong: str) -> None:
    class WrongLease(MemoryStore):
        def stage(self, slot: int) -> Staging:
            view = super().stage(slot).view
            views = {
                "misaligned": memoryview(bytearray(len(view) + 2 * BLOCK)),
                "short": view[:-BLOCK],
                "read-only": view.toreadonly(),
            }
            whole = views.get(wrong, view)
            if wrong == "misaligned":
                address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
                whole = whole[-address % BLOCK + 512 :]
            staging = Staging(slot + (wrong == "other slot"), whole)
            self.leased = {staging.slot: staging}
            return staging

    store = WrongLease(1)
    with Shards().filler() as filler:
        ticket = filler.submit([fill(store, 0, 0, 0)])[0]
        with pytest.raises(BackendContractError, match=r"stage\(0\) leased"):
            ticket.wait()
    assert store.discarded_count == 1
    store.close()


class Hang:
    """Reads of one file that do not return before `end`."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.begun = threading.Event()
        self.end = threading.Event()

    def __call__(self, file: int, buffer: memoryview, offset: int) -> None:
        if file == self.file:
            self.begun.set()
            assert self.end.wait(30)


def test_a_stuck_read_is_warned_of_once_and_given_up(log: list[dict[str, Any]]) -> None:
    store, hang = MemoryStore(2), Hang(1)
    with Shards(hang).filler(stall_warning_s=0.02, read_timeout_s=0.2) as filler:
        stuck, fine = filler.submit([fill(store, 0, 1, 2), fill(store, 1, 0, 2)])
        fine.wait()
        with pytest.raises(ReadFailed, match=rf"reading {Shards.paths[1]} at offset \d+, \d+ bytes wanted: .*given up"):
            stuck.wait()
        assert stuck.done()
        assert stuck.abandoned
        assert 0 in store.leased
        warned = [entry for entry in log if entry["event"] == "read_stalled"]
        assert {entry["path"] for entry in warned} == {str(Shards.paths[1])}
        assert len({entry["offset"] for entry in warned}) == len(warned) <= 3
        assert all(entry["length"] and entry["stalled_s"] >= 0.02 for entry in warned)
        hang.end.set()
    assert not stuck.abandoned
    with pytest.raises(ReadFailed):
        stuck.wait()
    assert (store.committed_count, store.discarded_count) == (1, 1)
    assert holds(store, 1, 0, 2)
    store.close()


def test_fills_behind_stuck_threads_fail_without_having_touched_their_slots() -> None:
    store, hang = MemoryStore(3), Hang(1)
    with Shards(hang).filler(thread_count=1, stall_warning_s=0.02, read_timeout_s=0.1) as filler:
        stuck, behind = filler.submit([fill(store, 0, 1, 2), fill(store, 1, 0, 2)])
        with pytest.raises(ReadFailed) as failure:
            behind.wait()
        assert "every filler thread was held up" in failure.value.__notes__[0]
        assert not behind.abandoned
        assert 1 not in store.leased
        with pytest.raises(ReadFailed):
            stuck.wait()
        assert stuck.abandoned
        hang.end.set()
        filler.submit([fill(store, 2, 0, 3)])[0].wait()
    assert store.staged_count == 2
    assert holds(store, 2, 0, 3)
    store.close()


@pytest.mark.parametrize("step", ["stage", "commit"])
def test_a_backend_that_never_answers_is_named(step: str) -> None:
    go_on = threading.Event()

    class Stuck(MemoryStore):
        def stage(self, slot: int) -> Staging:
            assert step == "commit" or go_on.wait(30)
            return super().stage(slot)

        def commit(self, staging: Staging) -> Commit:
            assert go_on.wait(30)
            return super().commit(staging)

    store = Stuck(1)
    with Shards().filler(stall_warning_s=0.02, read_timeout_s=0.1) as filler:
        ticket = filler.submit([fill(store, 0, 0, 0)])[0]
        with pytest.raises(
            MachineError, match=f"{'staging' if step == 'stage' else 'committing'} slot 0 has not ended"
        ):
            ticket.wait()
        assert ticket.abandoned
        go_on.set()
    assert not ticket.abandoned
    store.close()


def test_a_slow_but_steady_queue_does_not_time_out() -> None:
    store, steps = MemoryStore(FILE_COUNT * EXPERTS_PER_FILE), threading.Event()

    def answer(file: int, buffer: memoryview, offset: int) -> None:
        steps.wait(0.01)  # never set: each read takes ten milliseconds

    with Shards(answer).filler(thread_count=1, stall_warning_s=0.1, read_timeout_s=0.3) as filler:
        filler.submit(all_fills(store))[-1].wait()  # after 72 reads
    store.close()


def test_close_leaves_a_stuck_read_behind_and_says_so(
    log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expertstream.filler.filler._QUIET_CLOSE_S", 0.02)
    monkeypatch.setattr("expertstream.filler.filler._LONGEST_CLOSE_S", 0.05)
    store, hang = MemoryStore(2), Hang(1)
    shards = Shards(hang)
    filler = shards.filler(thread_count=1)  # a read that says nothing is given up after two minutes, not at a close
    stuck, queued = filler.submit([fill(store, 0, 1, 2), fill(store, 1, 0, 2)])
    assert hang.begun.wait(30)
    filler.close()
    assert [(entry["event"], entry["path"], entry["slot"]) for entry in log] == [
        ("close_waits", str(Shards.paths[1]), 0),
        ("read_left_behind", str(Shards.paths[1]), 0),
    ]
    assert isinstance(stuck.error, UsageError)
    assert isinstance(queued.error, UsageError)
    assert stuck.abandoned
    assert not queued.abandoned
    assert shards.open_count == 1  # the descriptor under the read
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("filler-")]
    assert all(thread.daemon for thread in threads)
    hang.end.set()
    for thread in threads:
        thread.join()
    assert not stuck.abandoned
    filler.close()
    assert shards.open_count == 0
    store.close()


def test_an_interrupt_while_waiting_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    store, hang = MemoryStore(FILE_COUNT * EXPERTS_PER_FILE), Hang(0)
    shards = Shards(hang)
    is_waiting, is_interrupted = threading.Event(), threading.Event()

    def what_a_waiter_logs(logger: object, method: str, event: Mapping[str, object]) -> NoReturn:
        is_waiting.set()
        raise structlog.DropEvent

    def on_interrupt(number: int, frame: object) -> None:
        if not is_interrupted.is_set():
            is_interrupted.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        assert is_waiting.wait(30)
        while not is_interrupted.wait(0.01):  # a signal just before the system call does not wake it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    log = structlog.wrap_logger(None, [what_a_waiter_logs])
    monkeypatch.setattr("expertstream.filler.filler.get_log", lambda: log)
    handler = signal.signal(signal.SIGINT, on_interrupt)
    try:
        filler = shards.filler(thread_count=2, stall_warning_s=0.02)
        tickets = filler.submit(all_fills(store))
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            tickets[0].wait()
        interrupter.join()
    finally:
        signal.signal(signal.SIGINT, handler)
    hang.end.set()
    tickets[1].wait()  # waiting goes on working
    filler.close()
    assert all(ticket.done() and not ticket.abandoned for ticket in tickets)
    committed = [slot for slot, ticket in enumerate(tickets) if ticket.error is None]
    assert all(holds(store, slot, *divmod(slot, EXPERTS_PER_FILE)) for slot in committed)
    assert store.committed_count == len(committed)
    assert shards.open_count == 0
    store.close()


def test_a_closed_filler_takes_no_fills_and_closes_again() -> None:
    store = MemoryStore(1)
    filler = Shards().filler()
    filler.close()
    filler.close()
    with pytest.raises(UsageError, match="closed"):
        filler.submit([fill(store, 0, 0, 0)])
    store.close()


def test_a_refused_file_leaves_no_thread_and_no_file_open(tmp_path: Path) -> None:
    shards = Shards()

    def open_file(path: Path, direct: bool) -> RawFile:
        return open_raw_file(path, direct) if path.parent == tmp_path else shards(path, direct)

    with pytest.raises(CheckpointError, match="missing"):
        Filler([*Shards.paths, tmp_path / "missing"], commit, open_file=open_file)
    assert shards.open_count == 0
    with pytest.raises(ConfigError, match="at least 1"):
        Filler(Shards.paths, commit, thread_count=0, open_file=shards)


def test_the_mode_that_is_said_is_the_mode_in_use(log: list[dict[str, Any]]) -> None:
    store = MemoryStore(1)

    def answer(file: int, buffer: memoryview, offset: int) -> None:
        if file == 1 and not log:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with Shards(answer).filler(thread_count=1) as filler:
        assert filler.io_mode == "direct"
        filler.submit([fill(store, 0, 1, 0)])[0].wait()
        assert filler.io_mode == "mixed"
    with Shards().filler(io_mode="buffered") as filler:
        assert filler.io_mode == "buffered"
    assert holds(store, 0, 1, 0)
    store.close()


def test_fills_that_cannot_be_are_refused_before_anything_is_queued() -> None:
    store = MemoryStore(1)
    small = MemoryStore(1, SlotLayout(LAYOUT.parts[:2]))
    reads = fill(store, 0, 0, 0).reads
    with pytest.raises(ValueError, match="begins before the room in front of it ends"):
        Fill(store, 0, (reads[1], reads[0]), "swapped")
    with pytest.raises(ValueError, match="reads"):
        Fill(store, 0, (), "empty")
    with Shards().filler() as filler:
        for wrong in (fill(store, 0, FILE_COUNT, 0), fill(small, 0, 0, 0)):
            with pytest.raises(UsageError, match="ExpertKey"):
                filler.submit([fill(store, 0, 0, 0), wrong])
    assert store.staged_count == 0
    store.close()
    small.close()


def test_many_waiters_of_one_ticket_all_get_its_commit() -> None:
    store, hang = MemoryStore(1), Hang(0)
    with Shards(hang).filler() as filler:
        ticket: Ticket = filler.submit([fill(store, 0, 0, 0)])[0]
        got: list[Commit] = []
        waiters = [threading.Thread(target=lambda: got.append(ticket.wait())) for _ in range(4)]
        for waiter in waiters:
            waiter.start()
        assert hang.begun.wait(30)
        assert not ticket.done()
        assert ticket.error is None
        hang.end.set()
        for waiter in waiters:
            waiter.join()
    assert got == [READY] * 4
    store.close()
