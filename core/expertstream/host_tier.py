"""The host tier: slots in host memory below those that kernels read, so that what left these need not be read again.

It owns which expert each host slot keeps, and the growth of the tier in the background. What is loaded and evicted is
the streamer's business, whose lock guards all of this.

An inclusive tier keeps what is read from the file, by its rank. An exclusive one gives up first what a slot has too,
and takes over what leaves a slot, so that slots and tier hold different experts wherever there is no room for both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from threading import Event, RLock, Thread

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from expertstream import residency
from expertstream.backends import Backend
from expertstream.errors import BackendContractError, DeviceOutOfMemory, MachineError
from expertstream.log import get_log
from expertstream.residency import Ranks
from expertstream.size_classes import name_layers
from expertstream.slots import HostSlots, SlotStore, Staging

PIECE_BYTES = 256 << 20
"""What is allocated at once: pinning it takes a tenth of a second or so, in which a driver may answer nobody else."""

FEWEST_SLOTS = 64
"""An allocation that fails is halved and tried again down to this many slots.

Where a piece has no more than these, slots are so large that each is worth an allocation: then it goes down to one.
"""


@frozen
class TierClass:
    """The host slots planned for one store, and the layers that it serves."""

    store: SlotStore
    layers: tuple[int, ...]
    slot_count: int


@frozen
class TierState:
    """How much of a host tier is there. `slot_count` of `planned_slots` are, which take `pinned_bytes`."""

    planned_slots: int
    slot_count: int
    pinned_bytes: int
    is_growing: bool


class HostTier:
    """Host slots of all stores, numbered across them in the order of the classes.

    Methods are called under the streamer's lock, but for `grow`, `stage` and `close`; the last two may block.
    """

    def __init__(
        self,
        backend: Backend,
        classes: Sequence[TierClass],
        layer_count: int,
        experts_per_layer: int,
        lock: RLock,
        *,
        is_exclusive: bool,
    ) -> None:
        """Nothing is allocated before `grow`."""
        self._is_exclusive = is_exclusive
        self.copied_bytes = 0
        """Bytes of slots that were taken over by copying them."""
        self._backend = backend
        self._classes = tuple(classes)
        self._lock = lock
        self._experts_per_layer = experts_per_layer
        self._slot_bytes = {layer: each.store.layout.slot_bytes for each in classes for layer in each.layers}
        slot_range = np.zeros((layer_count, 2), np.int64)
        self._firsts: list[int] = []
        end = 0
        for planned in classes:
            self._firsts.append(end)
            end += planned.slot_count
            for layer in planned.layers:
                slot_range[layer] = self._firsts[-1], end
        self._tables = residency.make_tables(layer_count, experts_per_layer, slot_range)
        self._tables.state[:] = residency.ABSENT
        self._places: list[tuple[HostSlots, int] | None] = [None] * end
        self._pinned_bytes = 0
        self._is_closing = Event()
        self._thread: Thread | None = None
        self._error: Exception | None = None

    @property
    def state(self) -> TierState:
        """How far it has grown."""
        ready = int(np.count_nonzero(self._tables.state != residency.ABSENT))
        is_growing = self._thread is not None and self._thread.is_alive()
        return TierState(len(self._places), ready, self._pinned_bytes, is_growing)

    def grow(self) -> None:
        """Begin to allocate what was planned, piece by piece in a thread; each piece is of use once it is there.

        Raises MachineError where the system has no thread to give.
        """
        self._thread = Thread(target=self._grow, name="host-tier", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # what Python says then
            self._thread = None
            raise MachineError(
                f"the thread that pins the host tier could not be started: {error}; raise the limit on processes"
                " (ulimit -u) or on address space (ulimit -v), or the container's, or turn the tier off with host"
                " memory of 0"
            ) from error

    def take_error(self) -> Exception | None:
        """What growing ended with that is not for want of memory; once."""
        error, self._error = self._error, None
        return error

    def close(self, limit_s: float) -> bool:
        """End the growth; false if an allocation is still under way after so many seconds."""
        self._is_closing.set()
        if self._thread is not None and self._thread.ident is not None:  # it has begun
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()

    def lease(
        self,
        ranks: Ranks,
        layer: int,
        experts: NDArray[np.int64],
        numbers: NDArray[np.int64],
        leaving: NDArray[np.int64],
        slots: Sequence[int],
    ) -> NDArray[np.bool_]:
        """Lease host slots for experts of a layer, until `publish` or `forget`; which of them are kept there.

        The others are to be filled. `numbers` is filled with the host slots, -1 where an expert gets none. `leaving`
        are experts, counted across layers, that the layer's store loses from its `slots`, -1 for none: an exclusive
        tier takes these over. Raises CommitFailed where a copy cannot be started; `numbers` then says what is leased.
        """
        if not self._is_exclusive:
            leaving, slots = leaving[:0], ()
        found, taken = np.empty(experts.size, np.uint8), np.full(leaving.size, -1, np.int64)
        try:
            residency.exchange(self._tables, ranks, layer, experts, leaving, numbers, found, taken, self._is_exclusive)
            self._take_over(layer, taken.tolist(), slots)
        except BaseException:
            for number in taken[taken >= 0].tolist():
                if self._tables.state[number] == residency.LOADING:
                    self.forget(number)
            raise
        kept: NDArray[np.bool_] = found == residency.READY
        return kept

    def _take_over(self, layer: int, numbers: Sequence[int], slots: Sequence[int]) -> None:
        """Copy what leaves these slots into these host slots; -1 is none."""
        for number, slot in zip(numbers, slots, strict=True):
            if number >= 0:
                piece, place = self._place(number)
                try:
                    self._backend.asked("HostSlots.keep", partial(piece.keep, slot, place))
                except BaseException as error:
                    error.add_note(f"while backend {self._backend.name!r} was to keep what leaves slot {slot}")
                    raise
                self.copied_bytes += self._slot_bytes[layer]
                residency.settle(self._tables, number)

    def stage(self, number: int, slot: int) -> Staging:
        """Lease the bytes of a host slot, to be filled for a slot of its store; as `HostSlots.stage`."""
        piece, place = self._place(number)
        return self._backend.asked("HostSlots.stage", partial(piece.stage, place, slot))

    def restage(self, number: int, slot: int) -> Staging:
        """Lease the bytes that a host slot keeps, to be committed as a slot of its store; as `HostSlots.restage`."""
        piece, place = self._place(number)
        staging = self._backend.asked("HostSlots.restage", partial(piece.restage, place, slot))
        if staging.slot != slot:
            raise BackendContractError(
                f"restage({place}, {slot}) of backend {self._backend.name!r} leased slot {staging.slot}"
            )
        return staging

    def publish(self, number: int) -> None:
        """The host slot keeps its expert's bytes, which a slot has now too; the lease ends."""
        self._tables.state[number] = residency.SPARE if self._is_exclusive else residency.READABLE
        self._tables.leases[number] -= 1

    def forget(self, number: int) -> None:
        """The host slot keeps nothing; the lease ends."""
        residency.forget(self._tables, number, quarantine=False)
        self._tables.leases[number] -= 1

    def announce(self, layer: int, experts: NDArray[np.int64], needed: bool) -> None:
        """As `residency.announce`: a step in rounds will need these."""
        residency.announce(self._tables, layer, experts, needed)

    def _place(self, number: int) -> tuple[HostSlots, int]:
        place = self._places[number]
        assert place is not None, "absent slots are never leased"
        return place

    def _grow(self) -> None:
        began = time.monotonic()
        left = [planned.slot_count for planned in self._classes]
        sizes = [max(1, PIECE_BYTES // planned.store.layout.slot_bytes) for planned in self._classes]
        fewest = [FEWEST_SLOTS if size > FEWEST_SLOTS else 1 for size in sizes]
        refusal: DeviceOutOfMemory | None = None  # the last that ended the growth of a class
        failure: Exception | None = None
        try:
            while any(left) and not self._is_closing.is_set():
                for number, planned in enumerate(self._classes):
                    wanted = min(sizes[number], left[number])
                    if not wanted or self._is_closing.is_set():
                        continue
                    try:
                        piece = self._backend.alloc_host_slots(planned.store, wanted)
                    except DeviceOutOfMemory as error:
                        sizes[number] = max(wanted // 2, fewest[number])
                        if wanted <= fewest[number]:
                            refusal = error
                            left[number] = 0
                    else:
                        self._add(number, planned.slot_count - left[number], piece)
                        left[number] -= wanted
        except BaseException as error:  # noqa: BLE001  # a plugin may raise anything; the next pass raises it
            failure = error if isinstance(error, Exception) else _not_an_order(error)
            with self._lock:
                self._error = failure
        state = self.state
        fields: dict[str, object] = {
            "slots": state.slot_count,
            "planned": state.planned_slots,
            "pinned_bytes": state.pinned_bytes,
        }
        if 0 < state.slot_count < state.planned_slots:
            fields["classes"] = self._class_counts()
        if refusal is not None:
            fields["reason"] = str(refusal)
        if failure is not None:
            get_log().error("host_tier_failed", **fields, error=f"{type(failure).__name__}: {failure}")
        elif any(left):  # closed meanwhile
            tell = get_log().info if refusal is None else get_log().warning
            tell("host_tier_unfinished", **fields)
        elif refusal is not None:
            get_log().warning("host_tier_smaller" if state.slot_count else "host_tier_off", **fields)
        else:
            get_log().info("host_tier_ready", **fields, seconds=round(time.monotonic() - began, 3))

    def _class_counts(self) -> str:
        """How many of its planned slots each class has: "8 of 24 for layers 0-2; 0 of 8 for layer 3"."""
        counts = []
        for first, planned in zip(self._firsts, self._classes, strict=True):
            if planned.slot_count:
                states = self._tables.state[first : first + planned.slot_count]
                ready = np.count_nonzero(states != residency.ABSENT)
                counts.append(f"{ready} of {planned.slot_count} for {name_layers(planned.layers)}")
        return "; ".join(counts)

    def _add(self, number: int, grown: int, piece: HostSlots) -> None:
        """`piece` comes after the `grown` host slots that class `number` has already."""
        first = self._firsts[number] + grown
        with self._lock:
            for place in range(piece.slot_count):
                self._places[first + place] = piece, place
            self._tables.state[first : first + piece.slot_count] = residency.EMPTY
            self._pinned_bytes += piece.slot_count * self._classes[number].store.layout.slot_bytes


def _not_an_order(error: BaseException) -> BackendContractError:
    """What ends a program where it is raised, from a thread where it must not."""
    foreign = BackendContractError(f"{type(error).__name__} was raised while host slots were allocated: {error}")
    foreign.__cause__ = error
    return foreign
