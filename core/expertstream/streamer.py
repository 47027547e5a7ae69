"""Experts on demand: the streamer leases slots that hold the experts of a layer step, loading what is missing.

It owns the stores, the filler and the residency of one model. It does no arithmetic and knows no device: the
backend says where slots live, the policy says which expert goes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby, islice
from operator import add, sub
from threading import RLock
from types import TracebackType
from typing import Any, Self

import numpy as np
from attrs import astuple, field, frozen
from numpy.typing import NDArray

from expertstream import residency
from expertstream.backends import Backend
from expertstream.checkpoint.index import Checkpoint, ExpertLayer
from expertstream.config import IoMode
from expertstream.errors import StoreClosed, UsageError
from expertstream.filler import Fill, Filler, OpenFile, PartRead, Ticket, open_raw_file
from expertstream.host_tier import HostTier, TierClass, TierState
from expertstream.limits import Unfinished, within
from expertstream.loads import Load, Promotion
from expertstream.log import get_log
from expertstream.planner import Plan
from expertstream.policies import make_policy
from expertstream.size_classes import part_shift
from expertstream.slots import ExpertKey, SlotStore, StoreMemory

LOOKAHEAD = 16
"""Experts that a step in rounds has under way or leased at once: a drive's queue is full, and few slots churn."""


_LONGEST_GROWTH_S = 5.0
"""How long a close waits for a piece of the host tier, which takes a fraction of a second where a driver answers."""


@frozen
class Counters:
    """What has been counted since the streamer was opened; the difference of two is what lay between.

    `steps` are layer steps, `exhausted` those that needed more experts than their class has slots and ran in
    rounds. An expert that a step needs is a hit or a miss, once; `host_hits` are the misses that the host tier kept.
    `expert_bytes_read` are the experts' own bytes from the files, those of seeds included. `h2d_bytes` and `d2h_bytes`
    are whole slots copied to memory that the host cannot address, and from it. `disk_wait_s` is how long callers
    stood still for reads.
    """

    steps: int = 0
    hits: int = 0
    misses: int = 0
    host_hits: int = 0
    expert_bytes_read: int = 0
    exhausted: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    disk_wait_s: float = 0.0

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(*map(sub, astuple(self), astuple(earlier)))

    def __add__(self, other: Counters) -> Counters:
        return Counters(*map(add, astuple(self), astuple(other)))

    @property
    def hit_rate(self) -> float | None:
        """Hits of all experts needed, None before the first."""
        needed = self.hits + self.misses
        return self.hits / needed if needed else None


class Lease:
    """Slots that hold `experts` of `layer` until `release`; also a context manager that releases.

    `slots` (int64) numbers them across all stores, in the order of `experts`. Those at `ready` (int64 positions)
    are readable from the start; those at `pending` once `wait` has returned.
    """

    __slots__ = ("_parts", "_streamer", "_waiting", "experts", "layer", "pending", "ready", "slots")

    def __init__(self, streamer: ExpertStreamer, layer: int, experts: NDArray[np.int64]) -> None:
        self.layer = layer
        self.experts = experts
        self.slots = np.full(experts.size, -1, np.int64)  # so that a release before the slots are known ends nothing
        self.ready = streamer._positions[: experts.size]
        self.pending = streamer._positions[:0]
        self._streamer: ExpertStreamer | None = streamer
        self._waiting: dict[int, Load] = {}  # positions that are not readable, with what loads them
        self._parts: tuple[Lease, ...] = ()

    def __len__(self) -> int:
        return len(self.experts)

    def wait(self, stream: int | None = None) -> None:
        """Block until every slot is readable: by the host, or by work launched on `stream` from now on.

        Raises the first load's error (ReadFailed, CommitFailed, CheckpointError for a file that was written to since
        it was indexed, ...); the other experts stay usable, and the lease is still to be released.
        """
        if self._waiting:
            self._held_by()._wait(self._waiting.values(), stream)
            self._waiting = {position: load for position, load in self._waiting.items() if load.error is not None}
            for load in self._waiting.values():
                raise load.error or AssertionError("what waits has an error")

    def view(self, position: int) -> Mapping[str, Any]:
        """The parts of one expert by name, each (part_bytes,) uint8 with DLPack; dead after `release`.

        Raises UsageError for a lease that has ended or an expert that is pending, and the error of a load that failed.
        """
        streamer = self._held_by()
        if position in self._waiting:
            raise self._waiting[position].error or UsageError(
                f"expert {self.experts[position]} of layer {self.layer} is still being loaded: wait() first"
            )
        return streamer._views(self.layer, int(self.experts[position]), int(self.slots[position]))

    def release(self, stream: int | None = None) -> None:
        """End the lease; a second call does nothing. Does not block: loads under way go on for whoever comes next.

        Without `stream` the reads have ended. With it, work launched on it so far may still read, and the slots
        are not refilled before that has ended.
        """
        for part in self._parts:
            part.release(stream)
        if self._parts:
            self._streamer = None
        elif self._streamer is not None:
            self._streamer._release(self, stream)

    def __del__(self) -> None:
        self.release()  # one that nobody has any more, such as after an interrupt in the middle of its release

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _held_by(self) -> ExpertStreamer:
        if self._streamer is None:
            raise UsageError("this lease has ended")
        return self._streamer


@frozen(eq=False)
class _LayerReads:
    """Where the parts of a layer's experts are read from and to, ready for the filler."""

    names: tuple[str, ...]
    part_bytes: tuple[int, ...]
    expert_bytes: int
    files: NDArray[np.int32] = field(repr=False)  # (experts, parts)
    offsets: NDArray[np.int64] = field(repr=False)  # (experts, parts), in the file
    positions: NDArray[np.int64] = field(repr=False)  # (experts, parts), in the slot
    rooms: tuple[tuple[int, int], ...] = ()  # (offset, bytes) of each part's room


class ExpertStreamer:
    """The experts of one model, streamed into slots. Close it, or use it in a `with` statement.

    Threads: calls are serialized by a lock, so several threads may use one streamer; a lease may be released by
    another thread than its own. A step that finds every slot leased raises, it does not wait.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        backend: Backend,
        *,
        policy: str = "hotness",
        half_life_tokens: int | None = None,
        io_mode: IoMode = "auto",
        filler_threads: int = 8,
        read_timeout_s: float = 120,
        open_file: OpenFile = open_raw_file,
    ) -> None:
        """Open the files, allocate the stores that were planned and start the reading threads.

        A host tier that was planned begins to grow, and goes on after this has returned. `read_timeout_s` also limits
        commits that the host waits for, and how long closing may take. Raises ConfigError for the policy, MachineError
        where direct reads are asked for and refused, DeviceOutOfMemory, CheckpointError for files that have gone or
        changed since. `open_file` opens files, for fault injection.
        """
        self._backend = backend
        self._classes: list[tuple[SlotStore, tuple[int, ...]]] = []
        self._store_of_slot: list[tuple[SlotStore, int]] = []
        self._reads: dict[int, _LayerReads] = {}
        layer_count = checkpoint.layers[-1].layer + 1
        self.experts_per_layer = max(layer.expert_count for layer in checkpoint.layers)
        self._policy = make_policy(policy, layer_count * self.experts_per_layer, half_life_tokens)
        self._positions = np.arange(self.experts_per_layer)
        self._ones = np.ones(self.experts_per_layer, np.int64)
        self._pass_tokens = 1
        self._loads: dict[int, Load] = {}
        self._late_error: Exception | None = None
        self._limit_s = read_timeout_s
        self._copies = not backend.host_memory_is_device_addressable()
        self._tier: HostTier | None = None
        # Reentrant, because the garbage collector may end an abandoned step in the middle of another one.
        self._lock = RLock()
        self._closing = RLock()
        self._given_up: set[int] = set()  # ids of stores whose close was begun and is not known to have ended
        self._steps = self._hits = self._misses = self._host_hits = self._bytes_read = self._exhausted = 0
        self._h2d_bytes = 0
        self._disk_wait_s = 0.0
        self._filler: Filler | None = Filler(
            checkpoint.files,
            backend.commit_slot,
            thread_count=filler_threads,
            io_mode=io_mode,
            read_timeout_s=read_timeout_s,
            open_file=open_file,
            check_file=checkpoint.refuse_written,
        )
        try:
            checkpoint.refuse_changed()
            slot_range = np.zeros((layer_count, 2), np.int64)
            for planned in plan.classes:
                store = backend.alloc_slot_store(planned.size_class.layout, planned.slot_count)
                self._classes.append((store, planned.size_class.layers))
                first = len(self._store_of_slot)
                self._store_of_slot += [(store, slot) for slot in range(planned.slot_count)]
                for layer in planned.size_class.layers:
                    slot_range[layer] = first, len(self._store_of_slot)
            for experts in checkpoint.layers:
                self._reads[experts.layer] = _layer_reads(experts, self._store_of_slot[slot_range[experts.layer, 0]][0])
            self._tables = residency.make_tables(layer_count, self.experts_per_layer, slot_range)
            if plan.host_memory_bytes:
                tiers = [
                    TierClass(store, layers, planned.host_slot_count)
                    for (store, layers), planned in zip(self._classes, plan.classes, strict=True)
                ]
                is_exclusive = plan.host_tiering == "exclusive"
                self._tier = HostTier(
                    backend, tiers, layer_count, self.experts_per_layer, self._lock, is_exclusive=is_exclusive
                )
                self._tier.grow()
            elif plan.host_tier_off:
                get_log().info("host_tier_off", reason=plan.host_tier_off)
        except BaseException:
            self.close()
            raise

    @property
    def slot_count(self) -> int:
        """Slots of all stores together."""
        return len(self._store_of_slot)

    @property
    def io_mode(self) -> str:
        """How the files are really read: "direct", "buffered" or, where they differ, "mixed"."""
        return self._open_filler().io_mode

    @property
    def counters(self) -> Counters:
        """What has been counted so far, all at one moment."""
        with self._lock:
            self._reap()
            return Counters(
                steps=self._steps,
                hits=self._hits,
                misses=self._misses,
                host_hits=self._host_hits,
                expert_bytes_read=self._bytes_read,
                exhausted=self._exhausted,
                h2d_bytes=self._h2d_bytes,
                d2h_bytes=0 if self._tier is None else self._tier.copied_bytes,
                disk_wait_s=self._disk_wait_s,
            )

    @property
    def host_tier(self) -> TierState | None:
        """How far the host tier has grown, None where none was planned."""
        with self._lock:
            return None if self._tier is None else self._tier.state

    @property
    def memory(self) -> StoreMemory:
        """What all stores take now, by the backend's own account."""
        self._open_filler()
        stores = [self._backend.measure_store(store) for store, _ in self._classes]
        return StoreMemory(sum(store.slot_bytes for store in stores), sum(store.pinned_bytes for store in stores))

    def device_view(self, slot: int) -> Any:
        """The whole slot of that number, (slot_bytes,) uint8 with DLPack, whatever it holds; dies with the streamer."""
        store, local = self._store_of_slot[slot]
        return store.device_view(local)

    def part_positions(self, layer: int) -> NDArray[np.int64]:
        """Where in a slot each part of each expert of the layer begins: (experts, parts), bytes, int64."""
        return self._reads[layer].positions

    def begin_pass(self, tokens: int) -> None:
        """Tell the policy that a forward pass over `tokens` tokens begins: 1 in decode, more in prefill.

        Raises UsageError for none, and as `raise_late_failure` what nobody has been told of yet.
        """
        if tokens < 1:
            raise UsageError(f"a pass over {tokens} tokens: at least 1 is needed")
        self.raise_late_failure()
        with self._lock:
            self._pass_tokens = tokens
            self._policy.begin_pass(tokens)

    def raise_late_failure(self) -> None:
        """Raise what a commit failed with after work on a stream was told to go on behind it, once.

        To be called when that work has ended and before its results are used; a pass begins with it. Raises
        CommitFailed, and what the growth of the host tier ended with where that is not for want of memory.
        """
        with self._lock:
            self._reap()
            error, self._late_error = self._late_error, None
            if error is None and self._tier is not None:
                error = self._tier.take_error()
        if error is not None:
            raise error

    def acquire(
        self, layer: int, experts: Sequence[int] | NDArray[np.int64], *, wait: bool = True, stream: int | None = None
    ) -> Lease:
        """Lease slots for the `experts` of a layer step, all together, loading the missing ones at once.

        Returns when all are readable or, without `wait`, as soon as the reads are under way. An expert named twice is
        leased twice. Raises UsageError when fewer slots than needed are free of other leases (`rounds` takes any
        number), and what the loads raise.
        """
        lease = Lease(self, layer, self._checked(layer, experts))
        try:
            while (stray := self._step(lease)) is not None:
                self._wait([stray], None)
            if wait:
                lease.wait(stream)
        except BaseException:
            lease.release()
            raise
        return lease

    def rounds(
        self,
        layer: int,
        experts: Sequence[int] | NDArray[np.int64],
        counts: Sequence[int] | NDArray[np.int64],
        *,
        stream: int | None = None,
    ) -> Generator[Lease, None, None]:
        """Lease any number of distinct experts in the order given, some at a time, each loaded at most once.

        One step. Every lease covers the next experts in order, readable; it ends when the next one is asked for.
        Reads run ahead while the caller computes. `counts` is how many tokens of the pass chose each expert; a lease
        of several experts has no more tokens than the pass. Close the generator, or exhaust it, to end the step; of
        two steps at once, only one is sure to find what it needs later still in its slots. Raises as `acquire` does.
        """
        wanted, chosen_by = self._checked(layer, experts), np.array(counts, np.int64)
        if chosen_by.shape != wanted.shape or len(set(wanted.tolist())) < wanted.size:
            raise UsageError(f"{wanted.size} experts need distinct numbers and as many counts, not {chosen_by.shape}")
        ahead: deque[Lease] = deque()
        issued = done = 0
        try:
            with self._lock:
                self._open_filler()
                self._reap()
                self._announce(layer, wanted, chosen_by)
            while done < wanted.size:
                issued += self._issue(layer, wanted[issued:], ahead, needed=True)
                ahead[0].wait(stream)
                lease = self._readable_run(ahead, chosen_by[done:])
                yield lease
                lease.release(stream)
                for _ in range(len(lease)):
                    ahead.popleft()
                done += len(lease)
        finally:
            for lease in ahead:  # also those that were lent out: releasing twice does nothing
                lease.release(stream)
            with self._lock:
                residency.announce(self._tables, layer, wanted, False)
                if self._tier is not None:
                    self._tier.announce(layer, wanted, False)

    def hottest(self) -> dict[ExpertKey, float]:
        """Every expert used or seeded so far with its score, hottest first, as the policy ranks them."""
        with self._lock:
            rank, last_use = self._policy.ranks.rank.copy(), self._policy.ranks.last_use.copy()
        used = np.flatnonzero(last_use)
        ranked = used[np.lexsort((-last_use[used], -rank[used]))]
        return {ExpertKey(*divmod(number, self.experts_per_layer)): float(rank[number]) for number in ranked.tolist()}

    def seed(
        self, hottest: Mapping[ExpertKey, float], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> int:
        """Load experts before the first token: those of `hottest` that the backend chooses; how many were read.

        `hottest` is experts with their scores, hottest first; the policy keeps the chosen ones by them. Reads a few at
        a time, in file order, and calls `progress` with bytes done of all bytes. To be called before anyone needs an
        expert, so that nobody waits behind a guess. Raises BackendContractError for a choice that breaks the contract,
        and what the loads raise.
        """
        for key in hottest:
            self._checked(key.layer, [key.expert])
            if key.expert >= self.experts_per_layer:
                raise self._refusal(residency.OUT_OF_RANGE, key.layer, np.array([key.expert]))
        chosen: list[ExpertKey] = []
        for store, layers in self._classes:
            offered = [key for key in hottest if key.layer in layers]
            chosen += self._backend.seed_experts(offered, store.slot_count)
        chosen.sort(key={key: place for place, key in enumerate(hottest)}.__getitem__)
        with self._lock:
            self._open_filler()
            numbers = np.array([key.layer * self.experts_per_layer + key.expert for key in chosen], np.int64)
            self._policy.seed(numbers, np.array([hottest[key] for key in chosen], np.float64))
        total_bytes = sum(self._reads[key.layer].expert_bytes for key in chosen)
        done_bytes = read_count = 0
        for lease in self._seeds(sorted(chosen, key=self._file_position)):
            done_bytes += self._reads[lease.layer].expert_bytes
            read_count += len(lease.pending)
            progress(done_bytes, total_bytes)
        return read_count

    def close(self) -> None:
        """End the reads under way and free everything; leases and views are dead. A second call does nothing."""
        # One at a time, and each step is taken also where the one before is interrupted.
        with self._closing, ExitStack() as closing:
            closing.callback(self._close_stores)
            closing.callback(self._close_filler)
            if self._tier is not None:
                self._tier.close(min(self._limit_s, _LONGEST_GROWTH_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _close_filler(self) -> None:
        if self._filler is not None:
            self._filler.close()
            self._filler = None

    def _close_stores(self) -> None:
        is_growing = self._tier is not None and self._tier.state.is_growing
        with self._lock:
            written = {
                id(self._store_of_slot[slot][0])
                for slot, load in self._loads.items()
                if load.is_abandoned or not load.ticket.done()  # not done where closing the filler was interrupted
            }
        with ExitStack() as closing:  # not under the lock, which whatever the garbage collector ends here may want
            for store, _ in self._classes:
                if id(store) in self._given_up:
                    continue  # another close of it beside that one would hang as well
                if is_growing:
                    get_log().warning("store_left_open", reason="host memory is still being allocated for it")
                elif id(store) in written:
                    get_log().warning("store_left_open", reason="a read or copy that never ended may still write to it")
                else:
                    closing.callback(self._close_store, store)

    def _close_store(self, store: SlotStore) -> None:
        """A second time does nothing, which is the store's own promise; one that does not end is left behind."""
        self._given_up.add(id(store))
        try:
            within(self._limit_s, store.close)
        except Unfinished:
            get_log().warning("store_left_open", reason=f"closing it has not ended for {self._limit_s:g} s")
        except Exception:
            self._given_up.discard(id(store))
            raise
        else:
            self._given_up.discard(id(store))

    def _checked(self, layer: int, experts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers as an array of our own, of the one type and layout that the compiled step is compiled for."""
        wanted = np.array(experts, np.int64)
        if layer not in self._reads:
            raise UsageError(f"layer {layer} has no routed experts; these have: {sorted(self._reads)}")
        if wanted.ndim != 1 or wanted.size > self.experts_per_layer:
            raise UsageError(
                f"experts of shape {wanted.shape} were asked of layer {layer}; up to {self.experts_per_layer} numbers"
                " in a row are possible"
            )
        return wanted

    def _step(self, lease: Lease) -> Load | None:
        """Lease all and load what is missing, or answer with a load that has a slot needed here, to be waited for."""
        found = np.empty(lease.experts.size, np.uint8)
        with self._lock:
            filler = self._open_filler()
            self._reap()
            try:
                waiting = self._policy.layer_step(
                    self._tables, self._policy.ranks, lease.layer, lease.experts, self._ones, lease.slots, found
                )
                if waiting > 0:
                    self._load(filler, lease, found, needed=True)
            except BaseException:
                self._forget_unloaded(lease)
                raise
            if waiting < 0:
                stray = self._stray_load(lease.layer) if waiting == residency.EXHAUSTED else None
                if stray is None:
                    raise self._refusal(waiting, lease.layer, lease.experts)
                return stray
            if waiting == 0:
                self._hits += found.size
            self._steps += 1
        return None

    def _announce(self, layer: int, wanted: NDArray[np.int64], chosen_by: NDArray[np.int64]) -> None:
        """A step in rounds begins: what it needs is marked, and its selections count; under the lock."""
        if residency.announce(self._tables, layer, wanted, True) < 0:
            raise self._refusal(residency.OUT_OF_RANGE, layer, wanted)
        if self._tier is not None:
            self._tier.announce(layer, wanted, True)
        self._policy.select(self._policy.ranks, layer * self.experts_per_layer, wanted, chosen_by)
        self._steps += 1
        first, end = self._tables.slot_range[layer]
        self._exhausted += int(wanted.size > end - first)

    def _issue(self, layer: int, wanted: NDArray[np.int64], ahead: deque[Lease], *, needed: bool) -> int:
        """Lease the next experts one by one, as far as lookahead and spare slots go; how many were issued.

        What the step needs later is given up only when nothing else is left and nothing is under way.
        """
        if not wanted.size:
            return 0
        while True:
            with self._lock:
                issued = self._issue_spare(layer, wanted, ahead, needed)
                if issued or ahead:
                    return issued
                stray = self._stray_load(layer)
                if stray is None:
                    raise self._refusal(residency.EXHAUSTED, layer, wanted[:1])
            self._wait([stray], None)

    def _issue_spare(self, layer: int, wanted: NDArray[np.int64], ahead: deque[Lease], needed: bool) -> int:
        filler = self._open_filler()
        self._reap()
        spare = int(residency.free_slots(self._tables, layer, True))
        issued = 0
        for expert in wanted[: max(LOOKAHEAD - len(ahead), 0)].tolist():
            is_resident = self._tables.slot_of[layer * self.experts_per_layer + expert] >= 0
            if not is_resident and spare <= 0 and ahead:
                break
            lease = Lease(self, layer, np.array([expert]))
            found = np.empty(1, np.uint8)
            ahead.append(lease)  # before it holds anything, so that whoever ends the step ends it too
            try:
                answer = residency.lease(self._tables, self._policy.ranks, layer, lease.experts, lease.slots, found)
                if answer == residency.EXHAUSTED:
                    ahead.pop()
                    break
                self._load(filler, lease, found, needed=needed)
            except BaseException:
                self._forget_unloaded(lease)
                raise
            spare -= not is_resident
            issued += 1
        return issued

    def _forget_unloaded(self, lease: Lease) -> None:
        """Empty the slots that were given to this lease and that nothing will fill; under the lock."""
        for slot in lease.slots[lease.slots >= 0].tolist():
            if self._tables.state[slot] == residency.LOADING and slot not in self._loads:
                residency.forget(self._tables, slot, quarantine=False)

    def _readable_run(self, ahead: deque[Lease], counts: NDArray[np.int64]) -> Lease:
        """The first lease, which is readable, with those behind it that are too, within the tokens of the pass."""
        length, tokens = 1, int(counts[0])
        for lease in islice(ahead, 1, None):
            tokens += int(counts[length])
            if tokens > self._pass_tokens or self._tables.state[lease.slots[0]] != residency.READABLE:
                break
            lease._waiting = {}
            length += 1
        if length == 1:
            return ahead[0]
        parts = tuple(islice(ahead, length))
        joined = Lease(self, parts[0].layer, np.concatenate([lease.experts for lease in parts]))
        joined.slots = np.concatenate([lease.slots for lease in parts])
        joined._parts = parts
        return joined

    def _seeds(self, ordered: Sequence[ExpertKey]) -> Iterator[Lease]:
        """Lease experts in this order, each until the next one is asked for; reads run ahead."""
        ahead: deque[Lease] = deque()
        try:
            for layer, run in groupby(ordered, key=lambda key: key.layer):
                wanted = np.array([key.expert for key in run], np.int64)
                issued = 0
                while issued < wanted.size:
                    issued += self._issue(layer, wanted[issued:], ahead, needed=False)
                    if issued < wanted.size:
                        yield from self._oldest(ahead)
            while ahead:
                yield from self._oldest(ahead)
        finally:
            for lease in ahead:
                lease.release()

    def _oldest(self, ahead: deque[Lease]) -> Iterator[Lease]:
        ahead[0].wait()
        yield ahead[0]
        ahead[0].release()
        ahead.popleft()

    def _file_position(self, key: ExpertKey) -> tuple[int, int]:
        reads = self._reads[key.layer]
        return int(reads.files[key.expert, 0]), int(reads.offsets[key.expert, 0])

    def _load(self, filler: Filler, lease: Lease, found: NDArray[np.uint8], *, needed: bool) -> None:
        """Begin to load the misses and count, hits and misses only where a step needs them; under the lock."""
        lease.ready = np.flatnonzero(found == residency.READY)
        lease.pending = np.flatnonzero(found != residency.READY)
        missed = np.flatnonzero(found == residency.MISS)
        host_hits = 0
        if missed.size:
            host_hits = self._begin_loads(filler, lease.layer, lease.experts[missed], lease.slots[missed])
        lease._waiting = {
            position: self._loads[slot]
            for position, slot in zip(lease.pending.tolist(), lease.slots[lease.pending].tolist(), strict=True)
        }
        if needed:
            self._hits += found.size - missed.size
            self._misses += missed.size
            self._host_hits += host_hits

    def _begin_loads(self, filler: Filler, layer: int, experts: NDArray[np.int64], slots: NDArray[np.int64]) -> int:
        """Send what the last step missed to the filler, or up from the host tier; how many that is. Under the lock."""
        size_bytes = self._reads[layer].expert_bytes
        host_slots, kept = np.full(experts.size, -1, np.int64), np.zeros(experts.size, np.bool_)
        tickets: Sequence[Ticket] = ()
        loads: list[Load] = []
        try:
            if self._tier is not None:
                evicted = self._tables.evicted[: experts.size].copy()
                places = [self._store_of_slot[slot][1] for slot in slots.tolist()]
                kept = self._tier.lease(self._policy.ranks, layer, experts, host_slots, evicted, places)
            routes = list(zip(experts.tolist(), slots.tolist(), host_slots.tolist(), kept.tolist(), strict=True))
            tickets = filler.prepare([self._fill(layer, *route) for *route, is_kept in routes if not is_kept])
            unused = iter(tickets)
            loads = [
                Load(slot, Promotion() if is_kept else next(unused), size_bytes, host_slot)
                for _, slot, host_slot, is_kept in routes
            ]
            # Known before they run: whatever interrupts us now, the slots are not given away while they are written.
            self._loads |= {load.slot: load for load in loads}
            filler.start(tickets)
            for load in loads:
                if isinstance(load.ticket, Promotion):
                    self._promote(load, load.ticket)
        except BaseException as error:
            filler.cancel(tickets)
            for load in loads:
                if isinstance(load.ticket, Promotion) and not load.ticket.done():
                    load.ticket.error = UsageError(f"slot {load.slot} was not filled: {type(error).__name__}")
            in_use = {load.host_slot for load in self._loads.values()}
            for host_slot in host_slots.tolist():
                if self._tier is not None and host_slot >= 0 and host_slot not in in_use:
                    self._tier.forget(host_slot)
            raise
        return int(np.count_nonzero(kept))

    def _promote(self, load: Load, promotion: Promotion) -> None:
        """Begin the commit of what the host tier keeps; under the lock."""
        assert self._tier is not None, "nothing is promoted without a host tier"
        store, local = self._store_of_slot[load.slot]
        try:
            staging = self._tier.restage(load.host_slot, local)
            promotion.commit = self._backend.commit_slot(store, staging)
        except Exception as error:  # noqa: BLE001  # whoever needs the expert raises it
            error.add_note(f"while slot {load.slot} was filled from host slot {load.host_slot}")
            promotion.error = error

    def _fill(self, layer: int, expert: int, slot: int, host_slot: int) -> Fill:
        reads = self._reads[layer]
        store, local = self._store_of_slot[slot]
        parts = zip(
            reads.files[expert].tolist(),
            reads.offsets[expert].tolist(),
            reads.part_bytes,
            reads.positions[expert].tolist(),
            reads.rooms,
            strict=True,
        )
        return Fill(
            store,
            local,
            tuple(PartRead(file, offset, size, position, *room) for file, offset, size, position, room in parts),
            ExpertKey(layer, expert),
            None if host_slot < 0 or self._tier is None else partial(self._tier.stage, host_slot, local),
        )

    def _wait(self, loads: Collection[Load], stream: int | None) -> None:
        """Wait for all of these; what failed has its error."""
        began = time.perf_counter()
        waits_for_disk = not all(load.ticket.done() for load in loads)
        for load in loads:
            load.wait_for_bytes()
        arrived = time.perf_counter()
        for load in loads:  # all of them together within the limit, and each for a moment at least
            left_s = arrived + self._limit_s - time.perf_counter()
            load.wait(stream, max(min(1.0, self._limit_s), left_s), self._limit_s)
        with self._lock:
            if waits_for_disk:
                self._disk_wait_s += arrived - began
            self._reap()

    def _reap(self) -> None:
        """End the loads that are over: publish what everybody sees, give the slots of failures back; under the lock."""
        for load in [load for load in self._loads.values() if load.ticket.done()]:
            if load.ticket.error is None and not load.is_arrived:
                load.is_arrived = True
                self._count(load)
            if load.is_visible():
                residency.publish(self._tables, load.slot)
                del self._loads[load.slot]
                self._leave_host_slot(load)
            elif load.error is not None:
                if not load.is_ended:
                    load.is_ended = True
                    load.error.add_note(f"in slot {load.slot}, which backend {self._backend.name!r} was to commit")
                if load.is_ordered:
                    self._late_error = self._late_error or load.error
                is_abandoned = load.is_abandoned  # asked once: it may end at any moment
                residency.forget(self._tables, load.slot, quarantine=is_abandoned)
                if not is_abandoned:
                    self._leave_host_slot(load)
                    del self._loads[load.slot]

    def _count(self, load: Load) -> None:
        """Count what has arrived in host memory and is being committed; under the lock."""
        store, _ = self._store_of_slot[load.slot]
        if not isinstance(load.ticket, Promotion):
            self._bytes_read += load.expert_bytes
        if self._copies:
            self._h2d_bytes += store.layout.slot_bytes

    def _leave_host_slot(self, load: Load) -> None:
        """A load has ended: the host slot that it came through keeps the bytes or, if need be, not; under the lock."""
        host_slot, load.host_slot = load.host_slot, -1
        if self._tier is None or host_slot < 0:
            return
        if load.error is not None:
            self._tier.forget(host_slot)
        else:
            self._tier.publish(host_slot)

    def _stray_load(self, layer: int) -> Load | None:
        """A load under way that nobody waits for any more, and whose slot the layer could have; under the lock."""
        first, end = self._tables.slot_range[layer]
        for load in self._loads.values():
            if first <= load.slot < end and not self._tables.leases[load.slot] and not load.is_abandoned:
                return load
        return None

    def _release(self, lease: Lease, stream: int | None) -> None:
        with self._lock:  # so that no two reads of a slot are told at once
            if lease._streamer is None or self._filler is None:
                return
            try:
                if stream is not None:
                    for position, slot in enumerate(lease.slots.tolist()):
                        if slot >= 0 and position not in lease._waiting:  # nobody has read what is still on its way
                            store, local = self._store_of_slot[slot]
                            store.mark_read(local, stream)
            finally:
                lease._streamer = None  # first: a lease that ended twice would free what others read
                residency.release(self._tables, lease.slots)

    def _views(self, layer: int, expert: int, slot: int) -> Mapping[str, Any]:
        reads = self._reads[layer]
        whole = self.device_view(slot)
        return {
            name: whole[position : position + size]
            for name, size, position in zip(
                reads.names, reads.part_bytes, reads.positions[expert].tolist(), strict=True
            )
        }

    def _open_filler(self) -> Filler:
        if self._filler is None:
            raise StoreClosed("this streamer is closed")
        return self._filler

    def _refusal(self, answer: int, layer: int, wanted: NDArray[np.int64]) -> UsageError:
        if answer == residency.OUT_OF_RANGE:
            return UsageError(
                f"experts {wanted.tolist()} were asked of layer {layer}, which has 0 to {self.experts_per_layer - 1}"
            )
        first, end = self._tables.slot_range[layer]
        lost = int(np.count_nonzero(self._tables.state[first:end] == residency.QUARANTINED))
        free = int(residency.free_slots(self._tables, layer, False))
        return UsageError(
            f"{wanted.size} experts of layer {layer} were asked for at once; its class has {end - first} slots,"
            f" {free} of them free of leases and loads{f', {lost} lost to reads that never returned' if lost else ''}:"
            " release leases, use rounds(), or give more expert memory"
        )


def _layer_reads(layer: ExpertLayer, store: SlotStore) -> _LayerReads:
    offsets = np.stack([part.offsets for part in layer.parts], axis=1)
    room_starts = np.array([part.offset for part in store.layout.parts], np.int64)
    return _LayerReads(
        names=tuple(part.name for part in layer.parts),
        part_bytes=tuple(part.expert_bytes for part in layer.parts),
        expert_bytes=layer.expert_bytes,
        files=np.stack([part.files for part in layer.parts], axis=1),
        offsets=offsets,
        positions=room_starts + part_shift(offsets),
        rooms=tuple((part.offset, part.room_bytes) for part in store.layout.parts),
    )
