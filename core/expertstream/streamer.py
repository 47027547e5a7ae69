"""Experts on demand: the streamer leases slots that hold the experts of a layer step, loading what is missing.

It owns the stores, the filler and the residency of one model. It does no arithmetic and knows no device: the
backend says where slots live, the policy says which expert goes.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from operator import add, sub
from threading import Lock
from types import TracebackType
from typing import Any, Self

import numpy as np
from attrs import astuple, field, frozen
from numpy.typing import NDArray

from expertstream import residency
from expertstream.backends import Backend
from expertstream.checkpoint.index import Checkpoint
from expertstream.config import StreamSettings
from expertstream.errors import StoreClosed, UsageError
from expertstream.filler import Fill, Filler, OpenFile, PartRead, Ticket, open_raw_file
from expertstream.observers import get_log
from expertstream.planner import Plan
from expertstream.policies import make_policy
from expertstream.size_classes import part_shift
from expertstream.slots import ExpertKey, SlotStore

_LOOKAHEAD = 16  # experts read ahead within a step in rounds: enough to keep a drive's queue full, few slots to churn


@frozen
class Counters:
    """What has been counted since the streamer was opened; the difference of two is what lay between.

    `steps` are layer steps, `exhausted` those that needed more experts than their class has slots and ran in
    rounds. An expert that a step needs is a hit or a miss, once. `expert_bytes_read` are the experts' own bytes.
    """

    steps: int = 0
    hits: int = 0
    misses: int = 0
    expert_bytes_read: int = 0
    exhausted: int = 0

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

    __slots__ = ("_found", "_released", "_streamer", "experts", "layer", "slots")

    def __init__(
        self,
        streamer: ExpertStreamer,
        layer: int,
        experts: NDArray[np.int64],
        slots: NDArray[np.int64],
        found: NDArray[np.uint8] | None,
    ) -> None:
        self.layer = layer
        self.experts = experts
        self.slots = slots
        self._streamer = streamer
        self._found = found
        self._released = False

    def __len__(self) -> int:
        return len(self.experts)

    @property
    def ready(self) -> NDArray[np.int64]:
        """Positions that were readable when the lease began."""
        if self._found is None:
            return np.arange(len(self.experts))
        return np.flatnonzero(self._found == residency.READY)

    @property
    def pending(self) -> NDArray[np.int64]:
        """Positions that are readable only after `wait`."""
        if self._found is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self._found != residency.READY)

    def wait(self, stream: int | None = None) -> None:
        """Block until every slot is readable: by the host, or by work launched on `stream` from now on.

        Raises the first load's error (ReadFailed, CommitFailed, ...); the other experts stay usable, and the
        lease is still to be released.
        """
        if self._found is not None:
            self._streamer._settle(self.slots[self.pending], stream)

    def view(self, position: int) -> Mapping[str, Any]:
        """The parts of one expert by name, each (part_bytes,) uint8 with DLPack; dead after `release`."""
        return self._streamer._views(self.layer, int(self.experts[position]), int(self.slots[position]))

    def release(self, stream: int | None = None) -> None:
        """End the lease; a second call does nothing.

        Without `stream` the reads have ended. With it, work launched on it so far may still read, and the slots
        are not refilled before that has ended.
        """
        if not self._released:
            self._released = True
            self._streamer._release(self, stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


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
        settings: StreamSettings,
        *,
        open_file: OpenFile = open_raw_file,
    ) -> None:
        """Allocate the stores that were planned, open the files and start the reading threads.

        Raises DeviceOutOfMemory, MachineError where direct reads are asked for and refused, CheckpointError for files
        that have gone since. `open_file` is how files are opened, for fault injection.
        """
        self._checkpoint = checkpoint
        self._backend = backend
        self._classes: list[tuple[SlotStore, tuple[int, ...]]] = []
        self._store_of_slot: list[tuple[SlotStore, int]] = []
        self._filler: Filler | None = None
        layer_count = checkpoint.layers[-1].layer + 1
        self.experts_per_layer = max(layer.expert_count for layer in checkpoint.layers)
        self._policy = make_policy(settings.policy, layer_count * self.experts_per_layer, settings.half_life_tokens)
        slot_range = np.zeros((layer_count, 2), np.int64)
        self._reads: dict[int, _LayerReads] = {}
        try:
            for planned in plan.classes:
                store = backend.alloc_slot_store(planned.size_class.layout, planned.slot_count)
                self._classes.append((store, planned.size_class.layers))
                first = len(self._store_of_slot)
                self._store_of_slot += [(store, slot) for slot in range(planned.slot_count)]
                for layer in planned.size_class.layers:
                    slot_range[layer] = first, len(self._store_of_slot)
            for layer_experts in checkpoint.layers:
                store = self._store_of_slot[slot_range[layer_experts.layer, 0]][0]
                self._reads[layer_experts.layer] = _layer_reads(layer_experts, store)
            self._filler = Filler(
                checkpoint.files,
                backend.commit_slot,
                thread_count=settings.filler_threads,
                io_mode=settings.io_mode,
                read_timeout_s=settings.read_timeout_s,
                open_file=open_file,
            )
        except BaseException:
            self.close()
            raise
        self._tables = residency.make_tables(layer_count, self.experts_per_layer, slot_range)
        self._tickets: dict[int, Ticket] = {}
        self._lock = Lock()
        self._ones = np.ones(self.experts_per_layer, np.int64)
        self._steps = self._hits = self._misses = self._bytes_read = self._exhausted = 0

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
        """A snapshot of what has been counted."""
        return Counters(self._steps, self._hits, self._misses, self._bytes_read, self._exhausted)

    def device_view(self, slot: int) -> Any:
        """The whole slot of that number, (slot_bytes,) uint8 with DLPack, whatever it holds; dies with the streamer."""
        store, local = self._store_of_slot[slot]
        return store.device_view(local)

    def part_positions(self, layer: int) -> NDArray[np.int64]:
        """Where in a slot each part of each expert of the layer begins: (experts, parts), bytes, int64."""
        return self._reads[layer].positions

    def begin_pass(self, tokens: int) -> None:
        """Tell the policy that a forward pass over `tokens` tokens begins: 1 in decode, more in prefill."""
        with self._lock:
            self._policy.begin_pass(tokens)

    def acquire(
        self, layer: int, experts: Sequence[int] | NDArray[np.int64], *, wait: bool = True, stream: int | None = None
    ) -> Lease:
        """Lease slots for the distinct `experts` of a layer step, all together, loading the missing ones at once.

        Returns when all are readable or, without `wait`, as soon as the reads are under way. Raises UsageError when
        fewer slots than needed are free of other leases (`rounds` takes any number), and what the loads raise.
        """
        wanted = np.asarray(experts, np.int64)
        slots = np.empty(wanted.size, np.int64)
        found = np.empty(wanted.size, np.uint8)
        with self._lock:
            filler = self._open_filler()
            if layer not in self._reads:
                raise UsageError(f"layer {layer} has no routed experts; these have: {sorted(self._reads)}")
            counts = self._ones if wanted.size <= self._ones.size else np.ones(wanted.size, np.int64)
            waiting = self._policy.layer_step(self._tables, self._policy.ranks, layer, wanted, counts, slots, found)
            if waiting == 0:
                self._steps += 1
                self._hits += wanted.size
                return Lease(self, layer, wanted, slots, None)
            if waiting < 0:
                raise self._refusal(waiting, layer, wanted)
            self._steps += 1
            self._load(filler, layer, wanted, slots, found)
        lease = Lease(self, layer, wanted, slots, found)
        if wait:
            try:
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
        Reads run ahead while the caller computes. `counts` is how many tokens chose each expert. Close the
        generator, or exhaust it, to end the step. Raises as `acquire` does.
        """
        wanted = np.asarray(experts, np.int64)
        with self._lock:
            self._open_filler()
            resident = residency.announce(self._tables, layer, wanted, True) if layer in self._reads else -2
            if resident < 0:
                raise self._refusal(resident, layer, wanted)
            first_expert = layer * self.experts_per_layer
            self._policy.select(self._policy.ranks, first_expert, wanted, np.asarray(counts, np.int64))
            self._steps += 1
            first, end = self._tables.slot_range[layer]
            self._exhausted += int(wanted.size > end - first)
        ahead: list[Lease] = []
        issued = 0
        try:
            while ahead or issued < wanted.size:
                issued += self._issue(layer, wanted[issued:], ahead)
                lease = ahead.pop(0)
                try:
                    lease.wait(stream)
                    yield lease
                finally:
                    lease.release(stream)
        finally:
            for lease in ahead:
                lease.release(stream)
            with self._lock:
                residency.announce(self._tables, layer, wanted, False)

    def seed(self, hottest: Sequence[ExpertKey]) -> int:
        """Load experts before the first token: those of `hottest` that the backend chooses; how many were read.

        Reads in file order within a layer. Raises BackendContractError for a choice that breaks the contract.
        """
        before = self._misses
        for store, layers in self._classes:
            chosen = self._backend.seed_experts([key for key in hottest if key.layer in layers], store.slot_count)
            by_layer: dict[int, list[int]] = {}
            for key in sorted(chosen):
                by_layer.setdefault(key.layer, []).append(key.expert)
            for layer, experts in by_layer.items():
                for _ in self.rounds(layer, experts, self._ones[: len(experts)]):
                    pass
        return self._misses - before

    def close(self) -> None:
        """End the reads under way and free everything; leases and views are dead. A second call does nothing."""
        filler, self._filler = self._filler, None
        if filler is not None:
            filler.close()
        for store, _ in self._classes:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _issue(self, layer: int, wanted: NDArray[np.int64], ahead: list[Lease]) -> int:
        """Lease the next experts one by one as far as slots and lookahead go; how many were issued."""
        with self._lock:
            filler = self._open_filler()
            room = min(_LOOKAHEAD - len(ahead), int(residency.free_slots(self._tables, layer)), wanted.size)
            if room <= 0 and not ahead:
                raise self._refusal(residency.EXHAUSTED, layer, wanted[:1])
            for position in range(room):
                expert = wanted[position : position + 1]
                slots, found = np.empty(1, np.int64), np.empty(1, np.uint8)
                answer = residency.lease(self._tables, self._policy.ranks, layer, expert, slots, found)
                if answer < 0:
                    raise self._refusal(answer, layer, expert)
                self._load(filler, layer, expert, slots, found)
                ahead.append(Lease(self, layer, expert, slots, found))
            return max(room, 0)

    def _load(
        self,
        filler: Filler,
        layer: int,
        experts: NDArray[np.int64],
        slots: NDArray[np.int64],
        found: NDArray[np.uint8],
    ) -> None:
        """Send the misses to the filler and count; under the lock."""
        missed = np.flatnonzero(found == residency.MISS)
        missed_slots = slots[missed].tolist()
        fills = [
            self._fill(layer, int(expert), slot) for expert, slot in zip(experts[missed], missed_slots, strict=True)
        ]
        try:
            tickets = filler.submit(fills)
        except BaseException:
            for slot in missed_slots:
                residency.forget(self._tables, slot)
            residency.release(self._tables, slots)
            raise
        self._tickets.update(zip(missed_slots, tickets, strict=True))
        self._hits += len(experts) - len(missed)
        self._misses += len(missed)
        self._bytes_read += len(missed) * self._reads[layer].expert_bytes

    def _fill(self, layer: int, expert: int, slot: int) -> Fill:
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
        )

    def _settle(self, slots: NDArray[np.int64], stream: int | None) -> None:
        """Wait for the loads of these slots and publish them; raises the first error when all are settled."""
        first_error: Exception | None = None
        for slot in slots.tolist():
            ticket = self._tickets.get(slot)
            if ticket is None:  # settled already, by this lease or by another one on the same slot
                if self._tables.state[slot] != residency.READABLE and first_error is None:
                    first_error = UsageError(f"the load of slot {slot} failed for an earlier lease; release this one")
                continue
            try:
                commit = ticket.wait()
                if stream is None:
                    commit.wait()
                else:
                    commit.order_before(stream)
            except Exception as error:  # noqa: BLE001  # settle every load first, then raise
                first_error = first_error or error
                with self._lock:
                    if self._tickets.pop(slot, None) is not None:
                        residency.forget(self._tables, slot, ticket.abandoned)
            else:
                with self._lock:
                    if self._tickets.pop(slot, None) is not None:
                        residency.publish(self._tables, slot)
        if first_error is not None:
            raise first_error

    def _release(self, lease: Lease, stream: int | None) -> None:
        if self._filler is None:
            return
        if lease._found is not None:
            try:
                self._settle(lease.slots[lease.pending], stream)
            except Exception as error:  # noqa: BLE001  # whoever waits for the expert gets it; ending a lease does not
                get_log().debug("released_unread", layer=lease.layer, error=str(error))
        if stream is not None:
            for slot in lease.slots.tolist():
                store, local = self._store_of_slot[slot]
                store.mark_read(local, stream)
        with self._lock:
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
        if layer not in self._reads:
            return UsageError(f"layer {layer} has no routed experts; these have: {sorted(self._reads)}")
        if answer == residency.OUT_OF_RANGE:
            return UsageError(
                f"experts {wanted.tolist()} were asked of layer {layer}, which has 0 to {self.experts_per_layer - 1}"
            )
        first, end = self._tables.slot_range[layer]
        free = int(residency.free_slots(self._tables, layer))
        return UsageError(
            f"{wanted.size} experts of layer {layer} were asked for at once; its class has {end - first} slots,"
            f" {free} of them free of leases: release leases, use rounds(), or give more expert memory"
        )


def _layer_reads(layer: Any, store: SlotStore) -> _LayerReads:
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
