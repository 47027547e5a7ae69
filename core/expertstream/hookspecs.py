"""The contract between the core and the one selected backend.

A backend is a module of functions marked `@hookimpl`, named by an entry point in the group
`expertstream.backends`, that states the contract it was written for as a literal: `EXPERTSTREAM_CONTRACT = 1`.
The core makes one plugin manager for a run and registers in it that backend, the defaults of the hooks that the
backend leaves out, and any observers, so every hook has one answer. Three rules of pluggy shape the signatures:

* `firstresult`: the answer is the first that is not None, so a backend always answers with a value.
  `commit_slot` returns READY, never None, where there is nothing to do. Only `configure` answers nothing.
* A backend may take fewer arguments than the spec, so specs can grow; but an argument with a default is
  never passed, and is refused at start-up.
* An exception passes through pluggy unchanged, so a backend raises the errors of `expertstream.errors`
  and lets nothing of its driver's library escape.

Order: `configure`, `host_memory_is_device_addressable`, `describe_device`; then for each size class
`budget_for_expert_size`, in one round or two; then for each `alloc_slot_store`; then `seed_experts` and commits, and
`alloc_host_slots` meanwhile; `SlotStore.close` last. All but `commit_slot`, `launch_read`, `alloc_host_slots` and
`measure_store` are called from one thread at a time. A backend may be opened several times in one process, one after
the other or side by side, so what it keeps belongs to its stores, but for its options: those are the caller's at every
call but of the hooks that are given a store, which go by their store.

Lifetimes: a store lives from `alloc_slot_store` to `close`, a view as long as its store, a staging until its
commit or discard, a Commit as long as anyone holds it, also after the slot has been filled anew.

Three hazards that a backend must rule out, each by the hook or method named:

* bytes read before the commit is visible: `Commit.done`, `wait` and `order_before`;
* a staging buffer lent again before its copy ended: `SlotStore.stage`;
* a slot refilled while a kernel launched earlier still reads it: `SlotStore.mark_read`.
"""

# Bodies are docstrings alone: pluggy reads the signature and never runs them.
# mypy: disable-error-code="empty-body"

from collections.abc import Callable, Sequence

import pluggy

from expertstream.slots import (
    Commit,
    DeviceDescription,
    ExpertKey,
    HostSlots,
    SlotBudget,
    SlotLayout,
    SlotStore,
    Staging,
    StoreMemory,
)

PROJECT = "expertstream"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

CONTRACT_VERSION = 1
"""What a backend states as `EXPERTSTREAM_CONTRACT`. It grows when a backend written before would no longer be right,
not when an optional hook or an argument is added. A backend writes the number, not this name: that always agrees."""


@hookspec(firstresult=True)
def host_memory_is_device_addressable() -> bool:
    """Say whether kernels read the very bytes that host threads write to a staging view.

    Required. Called once each time the backend is opened, before anything is allocated. Asks the driver and not
    the name of the machine. True means that staging is the slot, that every commit is READY, and that slots and
    resident weights come out of one pool of memory. Raises BackendUnavailable when there is no driver or no
    device, saying which: the next backend that the configuration names is tried then.
    """


@hookspec(firstresult=True)
def budget_for_expert_size(
    expert_bytes: int, resident_bytes: int, asked: int | None, other_slots_bytes: int
) -> SlotBudget:
    """Say how many slots of `expert_bytes` fit beside `resident_bytes` of other weights, caches and slots.

    Required. Called once for each size class, before `alloc_slot_store`; slots granted to an earlier class, and the
    fewest that later ones can do with, are counted in `resident_bytes`, and weights and caches where they lie in the
    memory of the slots. `other_slots_bytes` of them are the slots, before the backend's own rounding of each, for a
    backend that has a limit of slots alone. Called once more for each where fewer are granted than the core chose by
    itself: asked for so many, the first class may be granted what all should share, so the core shares out what was
    granted and asks for that. Either answer may be the one that counts, and no answer reserves anything.
    `expert_bytes` is the size of a whole slot, rounded up to its alignment.
    `asked` is what the configuration asks for, None for as many as is wise; a backend may grant less and
    never more, and zero is an answer. The reason is one sentence with the numbers that decided. Allocates nothing.
    `staging_bytes` of the answer come out of the host's memory, so the core plans them there: a store pins no more than
    these before it is asked for host slots.
    Leave headroom where device and host share memory: there the system kills a process that takes too much
    instead of failing its allocation.
    """


@hookspec(firstresult=True)
def alloc_slot_store(layout: SlotLayout, slot_count: int) -> SlotStore:
    """Allocate every slot and every staging buffer now; nothing is allocated later.

    Required. Called once for each size class. Slots do not overlap; slots and staging views begin at multiples of
    `layout.alignment`. The store has the very `layout` and `slot_count` that were asked for; where fewer staging
    buffers can be had than wanted it makes do with fewer, at least one. The core closes the store. Raises
    DeviceOutOfMemory with the bytes asked for and the bytes free, and has then given back all that it took.
    """


@hookspec(firstresult=True)
def commit_slot(store: SlotStore, staging: Staging) -> Commit:
    """Publish `staging.view` to kernels as slot `staging.slot`, and end the lease.

    Required. Called from many filler threads at once, never twice for one slot at once, so a backend makes
    its device current in the calling thread. Must not wait for the copy: a store that kernels read directly
    returns READY, a discrete one starts the copy, records an event after it and returns a Commit on that
    event. The staging buffer is lent again no sooner than its copy has ended, and the copy starts no sooner than
    the reads told to `SlotStore.mark_read` have ended. Commits of one slot land in the order in which they were made.
    Raises CommitFailed, or the Commit does, where the bytes cannot be published; a commit that raises has ended the
    lease too, and the slot is empty.
    """


@hookspec(firstresult=True)
def seed_experts(hottest: Sequence[ExpertKey], slot_count: int) -> Sequence[ExpertKey]:
    """Choose which experts are loaded before the first token, first one first.

    Optional; by default the first `slot_count` of `hottest`, which a hotness list ranks. A backend answers when it
    knows better, such as () where nothing should be read ahead. Must return distinct members of `hottest`,
    no more than `slot_count`.
    """


@hookspec(firstresult=True)
def alloc_host_slots(store: SlotStore, slot_count: int) -> HostSlots:
    """Allocate that many host slots for a store whose slots are not host memory: a piece of its host tier.

    Optional; without it there is no host tier, and asking for one is refused. Called from a thread of the core's own
    while the store is in use, several times for one store, so that pinning goes on while a model loads: each piece is
    a few hundred MiB, aligned as the store's layout says. `SlotStore.close` frees it, and is not called before this has
    returned. Raises DeviceOutOfMemory with the bytes asked for, and has then given back all that it took: the core
    asks for half.
    """


@hookspec(firstresult=True)
def measure_store(store: SlotStore) -> StoreMemory:
    """Say how many bytes the store takes, staging buffers and host slots included. Allocates nothing.

    Optional; by default what the sizes of its slots come to, and nothing pinned, which a backend with a host tier
    knows better. Called from any thread at any time until `close`, also while `alloc_host_slots` runs.
    """


@hookspec(firstresult=True)
def describe_device() -> DeviceDescription:
    """Name the device and its memory, for people, and say in which type of memory kernels find the slots.

    Optional; by default nothing is known but that the slots are host memory. By `dlpack_type` an engine decides, before
    anything is allocated, which of its kernels read the slots, whether it has any, and whether what it keeps beside the
    slots takes host memory or the device's; a store whose views say another type is refused. May ask the driver,
    allocates nothing; called at any time, as often as someone looks, and the type is always the same for the same
    options. Raises BackendUnavailable as `host_memory_is_device_addressable` does.
    """


@hookspec(firstresult=True)
def configure(options: object) -> None:
    """Take the options that the user set for this backend.

    Optional; a backend without it has no options. The annotation of `options` in the backend is an attrs class,
    found at run time: its fields are the options, with their types, defaults and validators. Called each time the
    backend is opened, before any other hook, with an instance made from the user's settings; answers nothing. Where
    another opening or a listing was configured since, it is called again with that same instance before the next hook
    of this one, so to keep the options last given is enough; a store keeps those that it was made with, because hooks
    that are given a store and the store's own methods come without.
    Raises ConfigError for values that do not go together or that this machine cannot have.
    """


@hookspec(firstresult=True)
def launch_read(store: SlotStore, slot: int, stream: int, after_ms: int) -> Callable[[], bytes]:
    """Launch work on `stream` that takes `after_ms` milliseconds and then reads all of `slot`, as a kernel would.

    Optional, for the conformance suite, which cannot write a kernel: without it the tests of reads racing commits
    skip and say so. Returns as soon as the work is launched, never waiting for it. The returned function, called
    once from any thread, blocks until the work has ended and returns the slot_bytes bytes that it saw. The work is
    ordered as everything on `stream`: after what `Commit.order_before` and earlier launches put there. It protects
    its slot from refills only if `SlotStore.mark_read` is called after it. `stream` is one that the suite's fixture
    `streams` names: 0 unless the backend's own additions to the suite name others. Raises StoreClosed, IndexError.
    """


REQUIRED = frozenset({"host_memory_is_device_addressable", "budget_for_expert_size", "alloc_slot_store", "commit_slot"})
"""What a backend cannot leave out; the other hooks have defaults in `expertstream.default_hooks`."""
