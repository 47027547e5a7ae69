"""Find, check and open the one backend that the configuration names.

It owns the border to plugins: an answer that breaks the contract is caught here and named. It imports no
backend but the one that is opened or probed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import metadata
from typing import TypeVar

import pluggy
from attrs import frozen

import expertstream.default_hooks as default_hooks
import expertstream.hookspecs as hookspecs
from expertstream.errors import BackendContractError, BackendNotFound, BackendUnavailable, ExpertstreamError
from expertstream.slots import (
    Commit,
    DeviceDescription,
    ExpertKey,
    SlotBudget,
    SlotLayout,
    SlotStore,
    Staging,
)

GROUP = "expertstream.backends"
T = TypeVar("T")


@frozen
class BackendOffer:
    """A distribution's entry point that says: I am the backend of this name. Nothing is imported yet."""

    name: str
    distribution: str
    version: str
    entry_point: metadata.EntryPoint


@frozen
class BackendStatus:
    """Whether an installed backend can be used here. `problem` is None when it can."""

    offer: BackendOffer
    problem: str | None
    device: DeviceDescription | None = None
    addressable: bool | None = None


def installed_backends() -> dict[str, list[BackendOffer]]:
    """Each backend's name with the distributions that offer it, in the order of their names; imports none."""
    offers: dict[str, list[BackendOffer]] = {}
    for entry in metadata.entry_points(group=GROUP):
        distribution, version = (entry.dist.name, entry.dist.version) if entry.dist else ("unknown", "unknown")
        offers.setdefault(entry.name, []).append(BackendOffer(entry.name, distribution, version, entry))
    return {name: sorted(same, key=lambda offer: offer.distribution) for name, same in sorted(offers.items())}


def probe_backends() -> list[BackendStatus]:
    """Every installed backend, usable or the reason why not. One that is broken does not hide the others."""
    return [_probe(offer) for offers in installed_backends().values() for offer in offers]


@frozen
class Backend:
    """The hooks of one backend as ordinary typed calls, each answer checked; safe from any thread."""

    name: str
    hooks: pluggy.HookRelay

    def host_memory_is_device_addressable(self) -> bool:
        """As the hook of this name."""
        return self._answer("host_memory_is_device_addressable", bool)

    def budget_for_expert_size(self, expert_bytes: int, resident_bytes: int, asked: int | None) -> SlotBudget:
        """As the hook of this name; a grant above what was asked is refused."""
        budget = self._answer(
            "budget_for_expert_size", SlotBudget, expert_bytes=expert_bytes, resident_bytes=resident_bytes, asked=asked
        )
        if asked is not None and budget.slots > asked:
            raise BackendContractError(
                f"backend {self.name!r}: budget_for_expert_size granted {budget.slots} slots, {asked} were asked for"
            )
        return budget

    def alloc_slot_store(self, layout: SlotLayout, slot_count: int) -> SlotStore:
        """As the hook of this name; a store of another layout or with fewer slots is refused."""
        store = self._answer("alloc_slot_store", SlotStore, layout=layout, slot_count=slot_count)  # type: ignore[type-abstract]  # isinstance of a runtime protocol
        if store.slot_count != slot_count or store.layout != layout:
            store.close()
            raise BackendContractError(
                f"backend {self.name!r}: alloc_slot_store made {store.slot_count} slots of"
                f" {store.layout.slot_bytes} bytes, not {slot_count} of {layout.slot_bytes}"
            )
        return store

    def commit_slot(self, store: SlotStore, staging: Staging) -> Commit:
        """As the hook of this name."""
        # Called for every miss: no isinstance against a Protocol here, only the None check.
        commit: Commit | None = self.hooks.commit_slot(store=store, staging=staging)
        if commit is None:
            raise BackendContractError(f"backend {self.name!r}: commit_slot returned None; return READY instead")
        return commit

    def seed_experts(self, hottest: Sequence[ExpertKey], slot_count: int) -> Sequence[ExpertKey]:
        """As the hook of this name; experts named twice, too many or not in `hottest` are refused."""
        seeds = self._answer("seed_experts", Sequence, hottest=hottest, slot_count=slot_count)  # type: ignore[type-abstract]  # isinstance of an abstract class
        distinct = set(seeds)
        if len(seeds) > slot_count or len(distinct) < len(seeds) or not distinct <= set(hottest):
            raise BackendContractError(
                f"backend {self.name!r}: seed_experts must return distinct members of the {len(hottest)} hottest,"
                f" {slot_count} at most; it returned {len(seeds)}, {len(distinct)} of them distinct,"
                f" {len(distinct - set(hottest))} not in the list"
            )
        return seeds

    def describe_device(self) -> DeviceDescription:
        """As the hook of this name."""
        return self._answer("describe_device", DeviceDescription)

    def _answer(self, hook: str, kind: type[T], **arguments: object) -> T:
        answer = getattr(self.hooks, hook)(**arguments)
        if not isinstance(answer, kind):
            raise BackendContractError(f"backend {self.name!r}: {hook} returned {answer!r}, not a {kind.__name__}")
        return answer


def open_backend(name: str, observers: Iterable[object] = ()) -> Backend:
    """The backend called `name`, loaded and checked; no other is imported.

    `observers` are plugins of hook wrappers (logging, counting, fault injection), outermost last. Raises
    BackendNotFound, BackendUnavailable where it cannot be imported, BackendContractError where it is not one.
    """
    offers = installed_backends()
    if name not in offers:
        near = get_close_matches(name, offers, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BackendNotFound(f"no backend is called {name!r}; installed: {', '.join(offers) or 'none'}{hint}")
    if len(offers[name]) > 1:  # pluggy would silently keep whichever it met first
        both = " and ".join(f"{offer.distribution} {offer.version}" for offer in offers[name])
        raise BackendContractError(f"backend {name!r} is offered by {both}; uninstall all but one")
    return _load(offers[name][0], observers)


def _load(offer: BackendOffer, observers: Iterable[object]) -> Backend:
    where = f"backend {offer.name!r} ({offer.entry_point.value!r} of {offer.distribution} {offer.version})"
    try:
        plugin = offer.entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a foreign module may raise anything at import, SystemExit too
        raise BackendUnavailable(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    if plugin is None:
        raise BackendContractError(f"{where}: the entry point is None, not a module of hooks")
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(default_hooks, "defaults")
    try:
        manager.register(plugin, offer.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise BackendContractError(f"{where}: {error}") from error
    _check_hooks(manager, plugin, where)
    for observer in observers:
        manager.register(observer)
    return Backend(offer.name, manager.hook)


def _check_hooks(manager: pluggy.PluginManager, plugin: object, where: str) -> None:
    """Refuse what pluggy lets pass: required hooks left out, arguments with defaults."""
    callers = manager.get_hookcallers(plugin) or []
    missing = hookspecs.REQUIRED - {caller.name for caller in callers}
    if missing:
        unmarked = sorted(name for name in missing if hasattr(plugin, name))
        remedy = f"mark {', '.join(unmarked)} with @hookimpl" if unmarked else "write them and mark each with @hookimpl"
        raise BackendContractError(f"{where} lacks the hooks {', '.join(sorted(missing))}; {remedy}")
    for caller in callers:
        for implementation in caller.get_hookimpls():
            if implementation.plugin is plugin and implementation.kwargnames:
                raise BackendContractError(
                    f"{where}: {caller.name} has defaults for {', '.join(implementation.kwargnames)},"
                    " which would never be passed; remove the defaults"
                )


def _probe(offer: BackendOffer) -> BackendStatus:
    rivals = installed_backends()[offer.name]
    if len(rivals) > 1:
        others = ", ".join(other.distribution for other in rivals if other != offer)
        return BackendStatus(offer, f"the name is also offered by {others}; uninstall all but one")
    try:
        backend = _load(offer, ())
        return BackendStatus(offer, None, backend.describe_device(), backend.host_memory_is_device_addressable())
    except ExpertstreamError as error:
        return BackendStatus(offer, str(error))
    except Exception as error:  # noqa: BLE001  # a foreign hook may raise anything; the listing goes on and shows it
        return BackendStatus(offer, f"{type(error).__name__}: {error}")
