"""The objects that pass between the core and a backend.

The core owns policy: which expert sits in which slot, and when a slot may be refilled. The backend
owns memory: where the bytes lie and when a kernel sees them. A slot goes round one way only:

    empty -> stage() -> host fills view -> commit_slot() -> readable -> empty
                 \\-> discard() -> empty

A stream is a queue of work on the device, named by the number that the engine's array library gives it; work of
one stream runs in order. Where kernels run in the calling thread, 0 is the only one and means nothing.

Source of the cycle: ds4's expert cache (fill off to the side, publish once, never evict what a
command in flight still reads).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from attrs import Attribute, field, frozen, validators

IO_ALIGNMENT_BYTES = 4096
"""What direct reads are rounded outwards to: the largest logical block of drives in use (4Kn), and a page."""


@frozen(order=True)
class ExpertKey:
    """One routed expert of one layer; both count from 0 as in the checkpoint."""

    layer: int = field(validator=validators.ge(0))
    expert: int = field(validator=validators.ge(0))


def _aligned(instance: object, attribute: Attribute[int], value: int) -> None:
    if value % IO_ALIGNMENT_BYTES:
        raise ValueError(f"{attribute.name} is {value}, not a multiple of {IO_ALIGNMENT_BYTES}")


@frozen
class SlotPart:
    """The room of one projection inside a slot, in bytes.

    The projection's own bytes begin inside the room at their file offset modulo IO_ALIGNMENT_BYTES,
    so that a direct read, rounded outwards, lands in place; what lies around them is undefined.
    """

    name: str = field(validator=validators.min_len(1))
    offset: int = field(validator=[validators.ge(0), _aligned])
    room_bytes: int = field(validator=[validators.gt(0), _aligned])


def _contiguous(instance: object, attribute: Attribute[tuple[SlotPart, ...]], parts: tuple[SlotPart, ...]) -> None:
    end = 0
    for part in parts:
        if part.offset != end:
            raise ValueError(f"part {part.name!r} begins at {part.offset}; the part before it ends at {end}")
        end += part.room_bytes


@frozen
class SlotLayout:
    """Size, alignment and parts, in bytes, of every slot of a store."""

    parts: tuple[SlotPart, ...] = field(validator=[validators.min_len(1), _contiguous])
    alignment: int = field(default=IO_ALIGNMENT_BYTES, validator=[validators.gt(0), _aligned])

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the sum of its parts' rooms, a multiple of IO_ALIGNMENT_BYTES."""
        last = self.parts[-1]
        return last.offset + last.room_bytes


@frozen
class SlotBudget:
    """How many slots a backend grants, with the sentence that says why.

    `staging_bytes` are the most that a store of that many takes of host memory beside them: its staging buffers, with
    their rounding. They are 0 where staging is the slot.
    """

    slots: int = field(validator=validators.ge(0))
    reason: str = field(validator=validators.min_len(1))
    staging_bytes: int = field(default=0, validator=validators.ge(0))


@frozen
class DeviceDescription:
    """A device's name and its memory in bytes, for people, None where nobody knows; for engines, where its slots are.

    `dlpack_type` is what every view of its stores answers first to `__dlpack_device__`: a type of memory as dlpack.h
    numbers them (DLDeviceType), of which 1 is host memory.
    """

    name: str
    memory_bytes: int | None = None
    free_bytes: int | None = None
    dlpack_type: int = field(default=1, validator=validators.ge(1))


@frozen
class StoreMemory:
    """The bytes that a store takes in all, rounding included: of its slots, and of pinned host memory."""

    slot_bytes: int = field(validator=validators.ge(0))
    pinned_bytes: int = field(validator=validators.ge(0))


@frozen(eq=False)
class Staging:
    """A lease on `slot_bytes` of writable, `alignment`-aligned host memory for one slot.

    It ends exactly once, by `commit_slot` or by `SlotStore.discard`; `view` must not be touched
    afterwards, because it may already be another slot's.
    """

    slot: int
    view: memoryview


@runtime_checkable
class Commit(Protocol):
    """A commit under way. Every method may be called from any thread, any number of times, also when it is over."""

    def done(self) -> bool:
        """True once kernels see the bytes; never blocks. Raises CommitFailed if they never will."""
        ...

    def wait(self) -> None:
        """Block the calling host thread until `done`. Raises CommitFailed."""
        ...

    def order_before(self, stream: int) -> None:
        """Make work launched on `stream` from now on see the bytes; never blocks the host.

        Raises CommitFailed where it is known already that they will not come; later, `done` and `wait` say so.
        """
        ...


class _Ready:
    """The commit of memory that kernels read directly: over before it began."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def order_before(self, stream: int) -> None:
        return None

    def __repr__(self) -> str:
        return "READY"


READY: Commit = _Ready()


@runtime_checkable
class SlotStore(Protocol):
    """`slot_count` equal slots in memory that kernels read.

    Threads: `stage`, `commit_slot`, `discard` and `mark_read` may run at once for different slots, and the core
    never runs two of them at once for the same slot. `device_view` and `read_back` may be called from any thread at
    any time. `close` runs last, when no staging is leased. After it, methods that take a slot raise StoreClosed where
    they would touch its memory.
    """

    @property
    def slot_count(self) -> int:
        """How many slots there are; they are numbered from 0."""
        ...

    @property
    def layout(self) -> SlotLayout:
        """The layout that the store was made for."""
        ...

    def stage(self, slot: int) -> Staging:
        """Lease host bytes for `slot`, slot_bytes of them with undefined content; blocks while no buffer is free.

        A buffer is free when its lease has ended and its copy to the slot is over. Where staging *is* the slot, it
        blocks instead until the reads announced by `mark_read` are over. Raises StoreClosed, IndexError.
        """
        ...

    def discard(self, staging: Staging) -> None:
        """End a lease without publishing: a read from disk failed. The slot is then empty."""
        ...

    def mark_read(self, slot: int, stream: int) -> None:
        """Work launched so far on `stream` reads `slot`: new bytes must not land before it ends. Never blocks."""
        ...

    def device_view(self, slot: int) -> object:
        """What kernels are given: shape (slot_bytes,), uint8, with DLPack; the same memory at every call.

        Dies with the store. Raises StoreClosed, IndexError.
        """
        ...

    def read_back(self, slot: int) -> bytes:
        """Copy a readable slot to the host the way a kernel would read it. Slow; for checks.

        Raises StoreClosed, IndexError.
        """
        ...

    def close(self) -> None:
        """Wait for commits, announced reads and copies into host slots, then free everything, host slots too.

        A second call does nothing.
        """
        ...


@runtime_checkable
class HostSlots(Protocol):
    """`slot_count` slots of a store's layout in host memory, which keep their bytes: a host tier below the slots.

    A host slot is a staging buffer that still has, after the commit, what was committed from it; so the same expert
    need not be read again. Their leases end as those of `SlotStore.stage`, by `commit_slot` or by the store's
    `discard`, which get the very Staging that was leased; after a discard, what was staged to be filled is undefined.

    Threads: all methods may run at once for different host slots; the core never runs two of them at once for the same
    host slot, nor refills one while it is leased. They live until their store is closed, and raise StoreClosed after.
    """

    @property
    def slot_count(self) -> int:
        """How many there are; they are numbered from 0."""
        ...

    def stage(self, host_slot: int, slot: int) -> Staging:
        """Lease the host slot to be filled for `slot`; blocks while copies out of it or into it are under way.

        The view has undefined content. Raises StoreClosed, IndexError.
        """
        ...

    def restage(self, host_slot: int, slot: int) -> Staging:
        """Lease the host slot with the bytes that it keeps, to be committed as `slot`. Never blocks.

        The view is not to be written, and its bytes may still be on their way from `keep`: a commit comes after them.
        Raises StoreClosed, IndexError.
        """
        ...

    def keep(self, slot: int, host_slot: int) -> None:
        """Copy a slot whose commit is done into the host slot, before any later commit changes its bytes. Never blocks.

        The copy begins after those out of the host slot that were started before. Where it fails later, commits of what
        it should have kept raise CommitFailed, or their Commit does.

        Raises StoreClosed, IndexError, and CommitFailed where the copy cannot be started.
        """
        ...
