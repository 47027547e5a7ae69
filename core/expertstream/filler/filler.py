"""Fill slots with a pool of threads: stage, read the parts, commit.

It owns the order of fills, the end of every lease, and what becomes of a read that fails or never returns.
It does not know which slot is free or whose bytes a slot holds: the streamer does.
"""

from __future__ import annotations

import ctypes
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from attrs import Attribute, field, frozen, validators

from expertstream.config import IoMode
from expertstream.errors import BackendContractError, ConfigError, MachineError, ReadFailed, UsageError
from expertstream.filler.files import OpenFile, PartRead, SourceFile, open_raw_file
from expertstream.log import get_log
from expertstream.slots import IO_ALIGNMENT_BYTES, Commit, ExpertKey, SlotLayout, Staging


def _rooms_do_not_overlap(
    instance: Fill, attribute: Attribute[tuple[PartRead, ...]], reads: tuple[PartRead, ...]
) -> None:
    end = 0
    for read in reads:
        if read.room_offset < end:
            raise ValueError(f"the room at {read.room_offset} begins before the room in front of it ends, at {end}")
        end = read.room_offset + read.room_bytes


class StagingStore(Protocol):
    """What the filler asks of a store; every SlotStore is one, and says what these mean."""

    @property
    def layout(self) -> SlotLayout: ...

    def stage(self, slot: int) -> Staging: ...

    def discard(self, staging: Staging) -> None: ...


@frozen(eq=False)
class Fill:
    """One slot to be filled: what to read into it, in ascending order of the rooms. `label` is for error messages.

    `stage` leases the host bytes that are read into, None for the store's own `stage`.
    """

    store: StagingStore
    slot: int
    reads: tuple[PartRead, ...] = field(validator=[validators.min_len(1), _rooms_do_not_overlap])
    label: ExpertKey | str
    stage: Callable[[], Staging] | None = None


class Ticket:
    """A fill under way. Every method may be called from any thread."""

    __slots__ = (
        "_awaited",
        "_busy_threads",
        "_claimed_reads",
        "_commit",
        "_error",
        "_fill",
        "_filler",
        "_is_answered",
        "_is_over",
        "_staging",
        "_submitted_at",
    )

    def __init__(self, filler: Filler, fill: Fill) -> None:
        self._filler = filler
        self._fill = fill
        self._staging: Staging | None = None
        self._claimed_reads = 0
        self._busy_threads = 0
        self._commit: Commit | None = None
        self._error: BaseException | None = None
        self._is_answered = False  # `wait` returns
        self._is_over = False  # no thread touches the slot any more
        self._awaited = False
        self._submitted_at = time.monotonic()

    @property
    def _has_unclaimed_reads(self) -> bool:
        return self._claimed_reads < len(self._fill.reads)

    def done(self) -> bool:
        """True once the slot is committed or the fill has failed."""
        return self._is_answered

    def wait(self) -> Commit:
        """The slot's commit, which may itself be under way. Blocks until the fill is done.

        Raises what the fill failed with: ReadFailed, what the store or the backend raised, UsageError if the
        filler was closed before. A read that says nothing is warned of and, in the end, given up: see `abandoned`.
        """
        if not self._is_answered:
            self._filler._wait(self)
        if self._error is not None:
            raise self._error
        assert self._commit is not None, "an answered fill has a commit or an error"
        return self._commit

    @property
    def error(self) -> BaseException | None:
        """What the fill failed with; None if it is under way or committed."""
        return self._error if self._is_answered else None

    @property
    def abandoned(self) -> bool:
        """True while a thread of a fill that was given up may still write to the slot; it must not be refilled."""
        return self._is_answered and not self._is_over


class Filler:
    """Threads that fill slots from files, in the order of submission.

    Idle threads share the parts of one fill, so a single miss is read with as many requests as it has parts.
    """

    def __init__(
        self,
        files: Sequence[Path],
        commit: Callable[[Any, Staging], Commit],
        *,
        thread_count: int = 8,
        io_mode: IoMode = "auto",
        stall_warning_s: float = 10,
        read_timeout_s: float = 120,
        open_file: OpenFile = open_raw_file,
        check_file: Callable[[int], None] = lambda file: None,
    ) -> None:
        """Open and probe every file, then start the threads, which call `commit` with a fill's store and its staging.

        They also call `check_file` with a file's number when they have read a part from it: a fill fails with what that
        raises. It is a part of the read, also for `read_timeout_s`.

        Raises ConfigError, CheckpointError, ReadFailed, also for a probe that has not ended after `read_timeout_s`,
        and MachineError where "direct" is asked for and refused, or a thread cannot be started.
        """
        if thread_count < 1:
            raise ConfigError(f"{thread_count} filler threads were asked for; at least 1 is needed")
        self._commit = commit
        self._check_file = check_file
        self._stall_warning_s = stall_warning_s
        self._read_timeout_s = read_timeout_s
        self._bytes_read = 0
        # At most half of the threads wait for staging buffers, so that what is staged always finds a reader.
        self._stager_limit = max(1, thread_count // 2)
        self._stager_count = 0
        self._queued: deque[Ticket] = deque()
        self._staged: deque[Ticket] = deque()  # those with parts that no thread has claimed
        self._is_closing = False
        # Entered by `with self._lock`, never through the conditions: their `__enter__` is Python code, and a
        # KeyboardInterrupt that arrives inside it would leave the lock taken.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._answers = threading.Condition(self._lock)
        self._progress_at = time.monotonic()
        self._files: list[SourceFile] = []
        self._activities = [_Activity() for _ in range(thread_count)]
        self._threads: list[threading.Thread] = []
        try:
            for path in files:
                self._files.append(SourceFile(Path(path), io_mode, open_file, read_timeout_s))
            for number, activity in enumerate(self._activities):
                thread = threading.Thread(target=self._serve, args=(activity,), name=f"filler-{number}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # what Python says where the system has no thread to give
                    raise MachineError(
                        f"filler thread {number + 1} of {thread_count} could not be started: {error};"
                        " ask for fewer filler threads, or raise the limit on processes (ulimit -u) or on address space"
                        " (ulimit -v), or the container's"
                    ) from error
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Filler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def io_mode(self) -> str:
        """How the files are really read now: "direct", "buffered" or "mixed"."""
        modes = {file.reads_direct for file in self._files}
        return "mixed" if len(modes) > 1 else "direct" if True in modes else "buffered"

    @property
    def bytes_read(self) -> int:
        """Payload of all parts read so far, in bytes, without what rounding added."""
        return self._bytes_read

    def submit(self, fills: Sequence[Fill]) -> list[Ticket]:
        """One ticket for each fill, in order, all under way. Does not block. Raises UsageError, with nothing queued."""
        tickets = self.prepare(fills)
        self.start(tickets)
        return tickets

    def prepare(self, fills: Sequence[Fill]) -> list[Ticket]:
        """One ticket for each fill, in order, not under way: for a caller who must hold them before they are.

        Raises UsageError for a fill that this filler cannot do.
        """
        for fill in fills:
            self._check_bounds(fill)
        return [Ticket(self, fill) for fill in fills]

    def start(self, tickets: Sequence[Ticket]) -> None:
        """Queue what `prepare` made. Does not block. Raises UsageError, with nothing queued, when closed."""
        with self._lock:
            if self._is_closing:
                raise UsageError("fills were submitted to a filler that is closed")
            self._queued.extend(tickets)
            self._work.notify(sum(len(ticket._fill.reads) for ticket in tickets))

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Fail those that have parts which no thread has begun to read, started or not; the others end by themselves.

        Every one of them is answered sooner or later, without being waited for here.
        """
        with self._lock:
            left_to_us = self._fail_unread(tickets, "was cancelled before it was read")
        for ticket in left_to_us:
            self._settle(ticket, _Activity())

    def close(self) -> None:
        """Cancel what is queued, wait for the reads under way, end the threads and close the files.

        A read that goes on for longer is warned of, and is waited for a few seconds, or until `read_timeout_s`: then
        its fill becomes `abandoned`, and another warning says so. A second call does nothing.
        """
        with self._lock:
            self._is_closing = True
            begun = [activity.ticket for activity in self._activities if activity.ticket is not None]
            left_to_us = self._fail_unread(
                (*self._queued, *self._staged, *begun), "was not read before the filler closed"
            )
            self._work.notify_all()
        for ticket in left_to_us:
            self._settle(ticket, _Activity())
        self._join(_QUIET_CLOSE_S)
        limit_s = min(_LONGEST_CLOSE_S, self._read_timeout_s)
        for activity in self._activities:
            if activity.ticket is not None:
                get_log().warning("close_waits", **activity.fields(), at_most_s=limit_s)
        self._join(limit_s)
        stuck = self._abandon_stuck()
        for activity in stuck:
            get_log().warning("read_left_behind", **activity.fields())
        # A descriptor under a stuck read stays open: its number must not become another file's.
        stuck_paths = {activity.read[0] for activity in stuck if activity.read is not None}
        for file in self._files:
            if file.path not in stuck_paths:
                file.close()

    def _join(self, limit_s: float) -> None:
        """Wait for all threads to end, for so many seconds together."""
        ends_at = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))

    def _fail_unread(self, tickets: Sequence[Ticket], why: str) -> list[Ticket]:
        """Fail those with unclaimed parts; the answer is which of them the caller must settle. Under the lock."""
        unread = [ticket for ticket in tickets if ticket._has_unclaimed_reads]
        for ticket in unread:
            self._fail(ticket, UsageError(f"{ticket._fill.label} {why}"))
        return [ticket for ticket in unread if self._take_if_idle(ticket)]

    def _check_bounds(self, fill: Fill) -> None:
        for read in fill.reads:
            if read.file >= len(self._files):
                raise UsageError(f"{fill.label}: file number {read.file} was asked for, of {len(self._files)}")
        last = fill.reads[-1]
        slot_bytes = fill.store.layout.slot_bytes
        if last.room_offset + last.room_bytes > slot_bytes:
            raise UsageError(
                f"{fill.label}: its last room ends at {last.room_offset + last.room_bytes}; "
                f"a slot of this store has {slot_bytes} bytes"
            )

    def _serve(self, activity: _Activity) -> None:
        """What each thread does until the filler closes."""
        while True:
            with self._lock:
                while not self._staged and not self._may_stage:
                    if self._is_closing:
                        return
                    self._work.wait()
                ticket, read = self._claim()
                activity.begin(ticket, "staging" if read is None else "reading")
            is_last = self._stage(ticket, activity) if read is None else self._read(ticket, read, activity)
            if is_last:
                self._settle(ticket, activity)

    @property
    def _may_stage(self) -> bool:
        return bool(self._queued) and self._stager_count < self._stager_limit

    def _claim(self) -> tuple[Ticket, PartRead | None]:
        """The next part to read, or else a fill to stage; under the lock.

        Parts of staged fills come first. So no thread waits for a staging buffer while the parts of a fill that
        holds one lie unread, and a store with a single buffer cannot bring the filler to a halt.
        """
        if not self._staged:
            ticket = self._queued.popleft()
            ticket._busy_threads = 1
            self._stager_count += 1
            return ticket, None
        ticket = self._staged[0]
        read = ticket._fill.reads[ticket._claimed_reads]
        ticket._claimed_reads += 1
        ticket._busy_threads += 1
        if not ticket._has_unclaimed_reads:
            self._staged.popleft()
        return ticket, read

    def _stage(self, ticket: Ticket, activity: _Activity) -> bool:
        """Lease host bytes; true if the calling thread must settle the ticket."""
        error = self._begin_lease(ticket)
        with self._lock:
            self._stager_count -= 1
            is_last = self._leave(ticket, activity, error)
            if ticket._has_unclaimed_reads:
                self._staged.append(ticket)
                self._work.notify(len(ticket._fill.reads) - 1)
            if self._may_stage:
                self._work.notify()
        return is_last

    def _read(self, ticket: Ticket, read: PartRead, activity: _Activity) -> bool:
        """Read one part; true if the calling thread must settle the ticket."""
        error = self._read_part(ticket, read, activity)
        with self._lock:
            if error is None:
                self._bytes_read += read.length
            return self._leave(ticket, activity, error)

    # The next three call foreign code and return what it raises: whatever it is, it belongs to whoever waits. They
    # are functions of their own so that their frames have ended, and can be cleared, when the ticket is answered.

    def _begin_lease(self, ticket: Ticket) -> BaseException | None:
        try:
            fill = ticket._fill
            ticket._staging = fill.store.stage(fill.slot) if fill.stage is None else fill.stage()
            _check_staging(ticket._staging, fill)
        except BaseException as raised:  # noqa: BLE001  # see above
            return raised
        return None

    def _read_part(self, ticket: Ticket, read: PartRead, activity: _Activity) -> BaseException | None:
        assert ticket._staging is not None, "parts are claimed of staged fills alone"
        try:
            self._files[read.file].read(read, ticket._staging.view, activity.announce)
            self._check_file(read.file)
        except BaseException as raised:  # noqa: BLE001  # see above
            return raised
        return None

    def _end_lease(self, ticket: Ticket) -> tuple[Commit | None, BaseException | None]:
        store, staging = ticket._fill.store, ticket._staging
        try:
            if staging is None:
                return None, None
            if ticket._error is None:
                return self._commit(store, staging), None
            store.discard(staging)
        except BaseException as raised:  # noqa: BLE001  # see above
            return None, raised
        return None, None

    def _leave(self, ticket: Ticket, activity: _Activity, error: BaseException | None) -> bool:
        """Count the calling thread out of a fill; true if it was the last and must settle it. Under the lock."""
        self._progress_at = time.monotonic()
        ticket._busy_threads -= 1
        if error is not None:
            self._fail(ticket, error)
        if not ticket._has_unclaimed_reads and self._take_if_idle(ticket):
            activity.begin(ticket, "committing")
            return True
        activity.end()
        return False

    def _take_if_idle(self, ticket: Ticket) -> bool:
        """True if the caller is now the only one who may settle the ticket; under the lock."""
        if ticket._busy_threads or ticket._is_over:
            return False
        ticket._busy_threads = 1
        return True

    def _settle(self, ticket: Ticket, activity: _Activity) -> None:
        """End the lease, by a commit or by a discard, and answer."""
        commit, error = self._end_lease(ticket)
        with self._lock:
            if error is not None:
                self._fail(ticket, error)
            if ticket._error is not None:
                _clear_frames(ticket._error)
            ticket._commit = commit
            ticket._staging = None
            ticket._busy_threads = 0
            self._progress_at = time.monotonic()
            activity.end()
            ticket._is_over = True
            self._answer(ticket)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        """Keep the first error of a fill and offer its parts to no thread any more; under the lock."""
        if not isinstance(error, Exception):  # whoever waits would take it for an order to himself
            foreign = error
            error = BackendContractError(f"{type(foreign).__name__} was raised while a slot was filled: {foreign}")
            error.__cause__ = foreign
        if ticket._error is None:
            error.add_note(f"while filling slot {ticket._fill.slot} with {ticket._fill.label}")
            ticket._error = error
        elif ticket._error is not error:
            if str(error) != str(ticket._error):  # a file that has changed fails all its parts alike
                ticket._error.add_note(f"and then: {type(error).__name__}: {error}")
            _clear_frames(error)
        ticket._claimed_reads = len(ticket._fill.reads)
        for waiting in (self._queued, self._staged):
            if ticket in waiting:
                waiting.remove(ticket)

    def _answer(self, ticket: Ticket) -> None:
        ticket._is_answered = True
        if ticket._awaited:
            self._answers.notify_all()

    def _wait(self, ticket: Ticket) -> None:
        """Block until the ticket is answered; warn of the stall that holds it up, and give it up in the end."""
        while True:
            with self._lock:
                ticket._awaited = True
                if ticket._is_answered:
                    return
                activity, stalled_s = self._hold_up(ticket)
                if activity is not None and stalled_s >= self._read_timeout_s:
                    error = activity.timeout_error(stalled_s)
                    if activity.ticket is not ticket:
                        error.add_note("this fill had not begun: every filler thread was held up")
                    self._fail(ticket, error)
                    is_ours = self._take_if_idle(ticket)
                    if not is_ours:
                        self._answer(ticket)
                    break
                is_reported = activity is not None and activity.is_reported
                limit_s = self._read_timeout_s if is_reported else min(self._stall_warning_s, self._read_timeout_s)
                if activity is None or stalled_s < limit_s:
                    self._answers.wait(limit_s - stalled_s)
                    continue
                activity.is_reported = True
            get_log().warning("read_stalled", **activity.fields(), stalled_s=round(stalled_s, 3))
        if is_ours:
            self._settle(ticket, _Activity())

    def _hold_up(self, ticket: Ticket) -> tuple[_Activity | None, float]:
        """What a ticket waits for, and for how many seconds nothing has moved there; under the lock.

        That is its own oldest step; or, while no thread works for it, the oldest of all, since anything last ended.
        """
        now = time.monotonic()
        busy = [activity for activity in self._activities if activity.ticket is not None]
        own = [activity for activity in busy if activity.ticket is ticket]
        oldest = min(own or busy, key=lambda activity: activity.began_at, default=None)
        if oldest is None:
            return None, 0.0
        return oldest, now - (oldest.began_at if own else max(ticket._submitted_at, self._progress_at))

    def _abandon_stuck(self) -> list[_Activity]:
        """The steps that have not ended although the filler closes; their tickets are answered."""
        with self._lock:
            stuck = [activity for activity in self._activities if activity.ticket is not None]
            for activity in stuck:
                if activity.ticket is not None and not activity.ticket._is_answered:
                    self._fail(activity.ticket, activity.timeout_error(time.monotonic() - activity.began_at))
                    self._answer(activity.ticket)
            return stuck


_QUIET_CLOSE_S = 0.5
"""How long threads may take to end before somebody who presses Ctrl-C wonders what is going on."""

_LONGEST_CLOSE_S = 5.0
"""How long a close waits for storage after that. Nobody needs what is read then."""


class _Activity:
    """What one thread is doing now, so that whoever waits can say what for.

    Its thread writes; others look at it under the filler's lock, at a time at which it may have moved on.
    """

    __slots__ = ("began_at", "doing", "is_reported", "read", "ticket")

    def __init__(self) -> None:
        self.ticket: Ticket | None = None
        self.doing = ""
        self.read: tuple[Path, int, int] | None = None  # path, offset and length of the system call
        self.began_at = 0.0
        self.is_reported = False

    def begin(self, ticket: Ticket, doing: str) -> None:
        self.ticket, self.doing, self.read = ticket, doing, None
        self.began_at = time.monotonic()
        self.is_reported = False

    def announce(self, path: Path, offset: int, length: int) -> None:
        self.read = path, offset, length
        self.began_at = time.monotonic()
        self.is_reported = False

    def end(self) -> None:
        self.ticket = None

    def fields(self) -> dict[str, object]:
        """Fields of a log event."""
        fields: dict[str, object] = {"doing": self.doing}
        if self.ticket is not None:
            fields |= {"slot": self.ticket._fill.slot, "expert": str(self.ticket._fill.label)}
        if self.read is not None:
            path, offset, length = self.read
            fields |= {"path": str(path), "offset": offset, "length": length}
        return fields

    def timeout_error(self, stalled_s: float) -> ReadFailed | MachineError:
        """The error of a ticket that waited for this."""
        if self.read is not None:
            path, offset, length = self.read
            return ReadFailed(
                f"reading {path} at offset {offset}, {length} bytes wanted: the storage has not answered "
                f"for {stalled_s:.1f} s, and the read was given up"
            )
        slot = self.ticket._fill.slot if self.ticket is not None else "?"
        return MachineError(f"{self.doing} slot {slot} has not ended for {stalled_s:.1f} s, and was given up")


def _check_staging(staging: Staging, fill: Fill) -> None:
    view = staging.view
    last = fill.reads[-1]
    needed_bytes = last.room_offset + last.room_bytes
    if staging.slot != fill.slot or view.readonly or view.ndim != 1 or view.itemsize != 1 or len(view) < needed_bytes:
        raise BackendContractError(
            f"stage({fill.slot}) leased slot {staging.slot} as {len(view)} items of {view.itemsize} bytes, "
            f"{'read-only' if view.readonly else 'writable'}; {needed_bytes} writable bytes are needed"
        )
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    if address % IO_ALIGNMENT_BYTES:
        raise BackendContractError(
            f"stage({fill.slot}) leased memory at address {address:#x}, not a multiple of {IO_ALIGNMENT_BYTES}"
        )


def _clear_frames(error: BaseException) -> None:
    """Forget the locals of an error's frames: they hold the staging view, and an error may be kept for long."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
