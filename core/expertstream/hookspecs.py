"""The contract between the core and the one selected backend.

A backend is a module of functions marked `@hookimpl`, named by an entry point in the group
`expertstream.backends`. The core makes one plugin manager for a run and registers in it the defaults,
that backend and any observers, so every hook has one answer. Three rules of pluggy shape the signatures:

* `firstresult`: the answer is the first that is not None, so a backend always answers with a value.
  `commit_slot` returns READY, never None, where there is nothing to do; None would hand the call on.
* A backend may take fewer arguments than the spec, so specs can grow; but an argument with a default is
  never passed, and is refused at start-up.
* An exception passes through pluggy unchanged, so a backend raises the errors of `expertstream.errors`
  and lets nothing of its driver's library escape.

Three hazards that a backend must rule out, each by the hook or method named:

* bytes read before the commit is visible: `Commit.done`, `wait` and `order_before`;
* a staging buffer lent again before its copy ended: `SlotStore.stage`;
* a slot refilled while a kernel launched earlier still reads it: `SlotStore.mark_read`.
"""

# Bodies are docstrings alone: pluggy reads the signature and never runs them.
# mypy: disable-error-code="empty-body"

from collections.abc import Sequence

import pluggy

from expertstream.slots import Commit, DeviceDescription, ExpertKey, SlotBudget, SlotLayout, SlotStore, Staging

PROJECT = "expertstream"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def host_memory_is_device_addressable() -> bool:
    """Say whether kernels read the very bytes that host threads write to a staging view.

    Required. Called once, before anything is allocated. Asks the driver and not the name of the machine.
    True means that staging is the slot, that every commit is READY, and that slots and resident weights
    come out of one pool of memory. Raises BackendUnavailable when there is no driver or no device, saying which.
    """


@hookspec(firstresult=True)
def budget_for_expert_size(expert_bytes: int, resident_bytes: int, asked: int | None) -> SlotBudget:
    """Say how many slots of `expert_bytes` fit beside `resident_bytes` of other weights, caches and slots.

    Required. Called once for each size class, before `alloc_slot_store`; slots granted to an earlier class
    are counted in `resident_bytes`. `expert_bytes` is the size of a whole slot, rounded up to its alignment.
    `asked` is what the configuration asks for, None for as many as is wise; a backend may grant less and
    never more, and zero is an answer. Leave headroom where device and host share memory: there the system
    kills a process that takes too much instead of failing its allocation.
    """


@hookspec(firstresult=True)
def alloc_slot_store(layout: SlotLayout, slot_count: int) -> SlotStore:
    """Allocate every slot and every staging buffer now; nothing is allocated later.

    Required. Called once for each size class. Slots and staging views begin at multiples of
    `layout.alignment`. The core closes the store. Raises DeviceOutOfMemory with the bytes asked for and
    the bytes free.
    """


@hookspec(firstresult=True)
def commit_slot(store: SlotStore, staging: Staging) -> Commit:
    """Publish `staging.view` to kernels as slot `staging.slot`, and end the lease.

    Required. Called from many filler threads at once, never twice for one slot at once, so a backend makes
    its device current in the calling thread. Must not wait for the copy: a store that kernels read directly
    returns READY, a discrete one starts the copy, records an event after it and returns a Commit on that
    event. The copy starts no sooner than the reads told to `SlotStore.mark_read` have ended. A commit that
    raises has ended the lease too, and the slot is empty.
    """


@hookspec(firstresult=True)
def seed_experts(hottest: Sequence[ExpertKey], slot_count: int) -> Sequence[ExpertKey]:
    """Choose which experts are loaded before the first token, first one first.

    By default the first `slot_count` of `hottest`, which a hotness list ranks. A backend answers when it
    knows better, such as () where nothing should be read ahead. Must return distinct members of `hottest`,
    no more than `slot_count`.
    """


@hookspec(firstresult=True)
def describe_device() -> DeviceDescription:
    """Name the device and its memory, for people.

    Optional; by default a description that says nothing is known. May ask the driver, allocates nothing.
    """


REQUIRED = frozenset({"host_memory_is_device_addressable", "budget_for_expert_size", "alloc_slot_store", "commit_slot"})
"""What a backend cannot leave out; the other hooks have defaults in `expertstream.default_hooks`."""
