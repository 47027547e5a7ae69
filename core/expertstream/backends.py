"""Find, check and open the one backend that the configuration names, or the first usable one of several.

It owns the border to plugins: what breaks the contract is refused here and named, at start-up where that can be known,
else at the answer. It imports no backend but those that are tried or listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cached_property, partial
from importlib import metadata
from threading import Lock, RLock
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import attrs
import pluggy
from attrs import evolve, field, frozen

import expertstream.default_hooks as default_hooks
import expertstream.hookspecs as hookspecs
from expertstream.config import BackendOption, make_options
from expertstream.errors import (
    BackendContractError,
    BackendNotFound,
    BackendUnavailable,
    ConfigError,
    ExpertstreamError,
    MachineError,
    UsageError,
)
from expertstream.hook_checks import PluginHooks, check_hooks, check_observer, marked_hooks
from expertstream.log import get_log
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

GROUP = "expertstream.backends"
T = TypeVar("T")


@frozen
class BackendOffer:
    """A distribution's entry point that says: I am the backend of this name. Nothing is imported yet."""

    name: str
    distribution: str
    version: str
    entry_point: metadata.EntryPoint

    def __str__(self) -> str:
        source = f"entry point {self.entry_point.value!r} of {self.distribution} {self.version}"
        return f"backend {self.name!r} ({source})"


@frozen
class DeclaredOption:
    """An option that a backend has, with its type and default in words; `default` None where it must be given."""

    key: str
    kind: str
    default: str | None


@frozen
class BackendStatus:
    """Whether an installed backend can be used here. `problem` is None when it can."""

    offer: BackendOffer
    problem: str | None
    device: DeviceDescription | None = None
    addressable: bool | None = None
    options: tuple[DeclaredOption, ...] = ()


def installed_backends() -> dict[str, list[BackendOffer]]:
    """Each backend's name with the distributions that offer it, in the order of their names; imports none."""
    offers: dict[str, list[BackendOffer]] = {}
    for entry in metadata.entry_points(group=GROUP):
        distribution, version = (entry.dist.name, entry.dist.version) if entry.dist else ("unknown", "unknown")
        offers.setdefault(entry.name, []).append(BackendOffer(entry.name, distribution, version, entry))
    return {name: sorted(same, key=lambda offer: offer.distribution) for name, same in sorted(offers.items())}


def probe_backends(options: Sequence[BackendOption] = ()) -> list[BackendStatus]:
    """Every installed backend, usable or the reason why not. One that is broken does not hide the others.

    Each gets the `options` that are for it. Raises ConfigError for those that are for none of them.
    """
    installed = installed_backends()
    _refuse_stray_options(options, tuple(installed), installed)
    return [_probe(offer, rivals, options) for rivals in installed.values() for offer in rivals]


@attrs.frozen(eq=False, slots=False)  # without slots, because the answer that is asked for once is kept beside them
class Backend:
    """The hooks of one backend as ordinary typed calls, each answer checked; safe from any thread.

    `implemented` names the hooks that the backend has itself; `options` are what it was configured with, an instance
    of its attrs class, None where it has none. Another opening of the same backend, or a listing, changes nothing here.
    """

    offer: BackendOffer
    hooks: pluggy.HookRelay
    implemented: frozenset[str]
    options: attrs.AttrsInstance | None
    _turn: _Turn = field(repr=False)
    _commit_types: set[type] = field(init=False, factory=set, repr=False)

    @property
    def name(self) -> str:
        """The name that the configuration selects it by."""
        return self.offer.name

    def host_memory_is_device_addressable(self) -> bool:
        """As the hook of this name, which was asked when the backend was opened."""
        return self._is_addressable

    def budget_for_expert_size(
        self, expert_bytes: int, resident_bytes: int, asked: int | None, other_slots_bytes: int = 0
    ) -> SlotBudget:
        """As the hook of this name; a grant above what was asked is refused, and staging beside slots that are it."""
        budget = self._answer(
            "budget_for_expert_size",
            SlotBudget,
            expert_bytes=expert_bytes,
            resident_bytes=resident_bytes,
            asked=asked,
            other_slots_bytes=other_slots_bytes,
        )
        if asked is not None and budget.slots > asked:
            raise BackendContractError(
                f"{self.offer}: budget_for_expert_size granted {budget.slots} slots, {asked} were asked for"
            )
        if budget.staging_bytes and self._is_addressable:
            raise BackendContractError(
                f"{self.offer}: budget_for_expert_size told of {budget.staging_bytes} bytes of staging beside the"
                " slots, but staging is the slot where host memory is device addressable"
            )
        return budget

    def alloc_slot_store(self, layout: SlotLayout, slot_count: int) -> SlotStore:
        """As the hook of this name; a store of another layout or with fewer slots is refused."""
        store = self._answer("alloc_slot_store", SlotStore, layout=layout, slot_count=slot_count)  # type: ignore[type-abstract]  # isinstance of a runtime protocol
        if store.slot_count != slot_count or store.layout != layout:
            store.close()
            raise BackendContractError(
                f"{self.offer}: alloc_slot_store made {store.slot_count} slots of"
                f" {store.layout.slot_bytes} bytes, not {slot_count} of {layout.slot_bytes}"
            )
        return store

    def commit_slot(self, store: SlotStore, staging: Staging) -> Commit:
        """As the hook of this name."""
        commit: Commit = _called(
            self.offer, "commit_slot", lambda: self.hooks.commit_slot(store=store, staging=staging)
        )
        if type(commit) not in self._commit_types:  # for every miss: isinstance of a Protocol only for a new type
            self._checked("commit_slot", Commit, commit)  # type: ignore[type-abstract]  # isinstance of a runtime protocol
            self._commit_types.add(type(commit))
        return commit

    @property
    def has_host_tier(self) -> bool:
        """Whether host slots can be had below its slots; where those are host memory, they would keep bytes twice."""
        return "alloc_host_slots" in self.implemented and not self._is_addressable

    def alloc_host_slots(self, store: SlotStore, slot_count: int) -> HostSlots:
        """As the hook of this name, which goes by the store; fewer or more host slots than asked for are refused."""
        host_slots: HostSlots = _called(
            self.offer, "alloc_host_slots", lambda: self.hooks.alloc_host_slots(store=store, slot_count=slot_count)
        )
        self._checked("alloc_host_slots", HostSlots, host_slots)  # type: ignore[type-abstract]  # isinstance of a runtime protocol
        if host_slots.slot_count != slot_count:
            raise BackendContractError(
                f"{self.offer}: alloc_host_slots made {host_slots.slot_count} host slots; {slot_count} were asked for"
            )
        return host_slots

    def measure_store(self, store: SlotStore) -> StoreMemory:
        """As the hook of this name, which goes by the store."""
        return self._checked(
            "measure_store",
            StoreMemory,
            _called(self.offer, "measure_store", lambda: self.hooks.measure_store(store=store)),
        )

    def asked(self, what: str, call: Callable[[], T]) -> T:
        """What a method of one of its objects returns; whatever that raises is of `expertstream.errors`."""
        return _called(self.offer, what, call)

    def seed_experts(self, hottest: Sequence[ExpertKey], slot_count: int) -> Sequence[ExpertKey]:
        """As the hook of this name; experts named twice, too many or not in `hottest` are refused."""
        seeds = self._answer("seed_experts", Sequence, hottest=hottest, slot_count=slot_count)  # type: ignore[type-abstract]  # isinstance of an abstract class
        distinct = set(seeds)
        if len(seeds) > slot_count or len(distinct) < len(seeds) or not distinct <= set(hottest):
            raise BackendContractError(
                f"{self.offer}: seed_experts must return distinct members of the {len(hottest)} hottest,"
                f" {slot_count} at most; it returned {len(seeds)}, {len(distinct)} of them distinct,"
                f" {len(distinct - set(hottest))} not in the list"
            )
        return seeds

    def describe_device(self) -> DeviceDescription:
        """As the hook of this name."""
        return self._answer("describe_device", DeviceDescription)

    def launch_read(self, store: SlotStore, slot: int, stream: int, after_ms: int) -> Callable[[], bytes] | None:
        """As the hook of this name; None where the backend does not have it."""
        if "launch_read" not in self.implemented:
            return None
        launched: Callable[[], bytes] = self.hooks.launch_read(store=store, slot=slot, stream=stream, after_ms=after_ms)
        return self._checked("launch_read", Callable, launched)  # type: ignore[arg-type]  # isinstance of an abstract class

    @cached_property
    def _is_addressable(self) -> bool:
        return self._answer("host_memory_is_device_addressable", bool)

    def _answer(self, hook: str, kind: type[T], **arguments: object) -> T:
        with self._configured():
            answer = _called(self.offer, hook, lambda: getattr(self.hooks, hook)(**arguments))
        return self._checked(hook, kind, answer)

    @contextmanager
    def _configured(self) -> Iterator[None]:
        """The backend goes by these options inside, whoever opened or listed it since."""
        if self.options is None:
            yield
            return
        with self._turn.lock:
            if self._turn.of is not self:
                self._turn.of = None  # nobody's, should this fail
                _called(self.offer, "configure", partial(self.hooks.configure, options=self.options))
                self._turn.of = self
            yield

    def _checked(self, hook: str, kind: type[T], answer: object) -> T:
        if isinstance(answer, kind):
            return answer
        remedy = f"; expertstream.hookspecs.{hook} says what a backend answers there"
        if answer is None and kind is Commit:
            remedy = "; return READY where there is nothing to wait for"
        elif answer is not None and kind in (Commit, SlotStore, HostSlots):
            remedy = f"; it lacks {', '.join(name for name in _members(kind) if not hasattr(answer, name))}"
        raise BackendContractError(f"{self.offer}: {hook} returned {answer!r}, not a {kind.__name__}{remedy}")


def open_backend(
    names: str | Sequence[str], observers: Iterable[object] = (), options: Sequence[BackendOption] = ()
) -> Backend:
    """The backend called that, or the first usable one of several; no other is imported.

    Usable: it can be imported and checked, and after its options it answers whether host memory is addressable and
    what the device is. `observers` are plugins of hook wrappers (logging, counting, fault injection), outermost last.
    Each backend gets the `options` that are for it. Every refusal of one of several is logged as `backend_refused`;
    when all are refused, the error gives every reason. Raises BackendNotFound, BackendUnavailable, MachineError for a
    device that fails, BackendContractError for what is not a backend, ConfigError for options, also where others could
    be tried, and UsageError for an observer with hooks that would never be called.
    """
    wanted = [names] if isinstance(names, str) else list(names)
    installed = installed_backends()
    if not wanted:
        raise BackendNotFound(f"no backend is named; installed: {', '.join(installed) or 'none'}")
    _refuse_stray_options(options, wanted, installed)
    observers = tuple(observers)
    _check_observers(observers)
    refusals: list[ExpertstreamError] = []
    for name in wanted:
        try:
            offer = _offer(name, installed)
            backend = _started(offer, *_imported(offer), observers, options)
        except (BackendNotFound, BackendContractError, MachineError) as refusal:  # unavailable is a MachineError too
            if len(wanted) == 1:
                raise
            get_log().warning("backend_refused", backend=name, reason=str(refusal))
            refusals.append(refusal)
        else:
            if unused := [str(option.source) for option in options if not option.is_for(name)]:
                get_log().info("backend_options_not_used", backend=name, options=unused)
            return backend
    kind = BackendNotFound if all(isinstance(refusal, BackendNotFound) for refusal in refusals) else BackendUnavailable
    reasons = (f"  {name}: {refusal}" for name, refusal in zip(wanted, refusals, strict=True))
    raise kind("\n".join(["none of the backends named can be used:", *reasons])) from refusals[-1]


def _offer(name: str, installed: Mapping[str, Sequence[BackendOffer]]) -> BackendOffer:
    """The one distribution's offer of that name."""
    if name not in installed:
        hint = _did_you_mean(name, installed)
        raise BackendNotFound(f"no backend is called {name!r}; installed: {', '.join(installed) or 'none'}{hint}")
    if len(installed[name]) > 1:  # pluggy would silently keep whichever it met first
        all_of_them = " and ".join(map(_source, installed[name]))
        raise BackendContractError(f"backend {name!r} is offered by {all_of_them}: uninstall all but one")
    return installed[name][0]


def _source(offer: BackendOffer) -> str:
    return f"{offer.distribution} {offer.version} ({offer.entry_point.value!r})"


def _refuse_stray_options(
    options: Iterable[BackendOption], wanted: Sequence[str], installed: Mapping[str, object]
) -> None:
    """Refuse options that no backend would ever look at. A file may hold tables for backends not selected now."""
    problems = []
    for option in options:
        if not any(map(option.is_for, installed)):
            hint = _did_you_mean(option.backend, installed)
            problems.append(
                f"{option.source}: no backend is called {option.backend!r};"
                f" installed: {', '.join(installed) or 'none'}{hint}"
            )
        elif option.place in ("code", "option") and not any(map(option.is_for, wanted)):
            problems.append(f"{option.source}: backend {option.backend!r} is not selected; that is {', '.join(wanted)}")
    if problems:
        raise ConfigError("\n".join(problems))


def _check_observers(observers: Iterable[object]) -> None:
    """Refuse observers with hooks that would never be called."""
    problems = [f"observer {observer!r}: {problem}" for observer in observers for problem in check_observer(observer)]
    if problems:
        raise UsageError("\n".join(problems))


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _imported(offer: BackendOffer) -> tuple[object, PluginHooks]:
    """The plugin imported and checked, with none of its hooks called yet."""
    try:
        plugin = offer.entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a foreign module may raise anything at import, SystemExit too
        raise BackendUnavailable(
            f"{offer} cannot be imported: {type(error).__name__}: {error}; repair or uninstall {offer.distribution}"
        ) from error
    _check_version(offer, plugin)
    found = check_hooks(plugin)
    if found.problems:
        raise BackendContractError("; ".join([f"{offer}: {found.problems[0]}", *found.problems[1:]]))
    return plugin, found


def _check_version(offer: BackendOffer, plugin: object) -> None:
    if plugin is None:
        raise BackendContractError(f"{offer}: the entry point is None: let it name a module of hooks")
    stated = getattr(plugin, "EXPERTSTREAM_CONTRACT", None)
    wanted = hookspecs.CONTRACT_VERSION
    if stated is None:
        raise BackendContractError(
            f"{offer} does not state the contract that it was written for; this is contract {wanted}:"
            f" write EXPERTSTREAM_CONTRACT = {wanted} in it"
        )
    if type(stated) is not int or stated != wanted:
        raise BackendContractError(
            f"{offer} was written for contract {stated!r}, and this is contract {wanted}:"
            f" install a version of {offer.distribution} for contract {wanted}, or the expertstream that it is for"
        )


def _started(
    offer: BackendOffer,
    plugin: object,
    found: PluginHooks,
    observers: Iterable[object],
    options: Iterable[BackendOption],
) -> Backend:
    """The backend configured, and asked what it must know to be usable."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    # Not those that the backend has: where its own hook answers None, that must show.
    left_out = {hook: code for hook, code in marked_hooks(default_hooks).items() if hook not in found.implemented}
    for part in (SimpleNamespace(**left_out), plugin, *observers):
        manager.register(part)
    for_it = [option for option in options if option.is_for(offer.name)]
    values = None
    if found.options_class is not None:
        values = _called(offer, "configure", partial(make_options, found.options_class, offer.name, for_it))
    elif for_it:
        raise ConfigError("\n".join(f"{option.source}: backend {offer.name!r} has no options" for option in for_it))
    backend = Backend(offer, manager.hook, found.implemented, values, _turn_of(plugin))
    # The first that it is asked is what configures it.
    _called(offer, "host_memory_is_device_addressable", backend.host_memory_is_device_addressable)
    _called(offer, "describe_device", backend.describe_device)
    return backend


class _Turn:
    """Which opening of a plugin configured it last; under `lock` it stays so."""

    def __init__(self) -> None:
        self.lock = RLock()  # an observer may ask the backend that it observes
        self.of: Backend | None = None


_turns: dict[int, tuple[object, _Turn]] = {}
"""By the plugin's id, which is its own as long as it is kept here; a plugin may be of a kind that cannot be a key."""
_turns_lock = Lock()


def _turn_of(plugin: object) -> _Turn:
    with _turns_lock:
        return _turns.setdefault(id(plugin), (plugin, _Turn()))[1]


def _called(offer: BackendOffer, hook: str, call: Callable[[], T]) -> T:
    """What the call returns; what it raises is of `expertstream.errors`."""
    try:
        return call()
    except ExpertstreamError:
        raise
    except Exception as error:
        raise BackendContractError(
            f"{offer}: {hook} raised {type(error).__name__}: {error}; a hook raises errors of expertstream, such as"
            " BackendUnavailable where a device is missing and DeviceOutOfMemory where memory is"
        ) from error


def _probe(offer: BackendOffer, rivals: Sequence[BackendOffer], options: Sequence[BackendOption]) -> BackendStatus:
    status = BackendStatus(offer, None)
    try:
        if len(rivals) > 1:
            others = " and ".join(_source(rival) for rival in rivals if rival != offer)
            return evolve(status, problem=f"the name is also offered by {others}: uninstall all but one")
        plugin, found = _imported(offer)
        status = evolve(status, options=_declared(found.options_class))
        backend = _started(offer, plugin, found, (), options)
        return evolve(status, device=backend.describe_device(), addressable=backend.host_memory_is_device_addressable())
    except ExpertstreamError as error:
        return evolve(status, problem=str(error))
    except Exception as error:  # noqa: BLE001  # a foreign module may raise anything; the listing goes on and shows it
        return evolve(status, problem=f"{type(error).__name__}: {error}")


def _declared(options_class: type[attrs.AttrsInstance] | None) -> tuple[DeclaredOption, ...]:
    return tuple(
        DeclaredOption(attribute.name, _in_words(attribute.type), _default_in_words(attribute.default))
        for attribute in (attrs.fields(options_class) if options_class else ())
    )


def _in_words(kind: object) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(_in_words, get_args(kind)))
    if kind is NoneType:
        return "None"
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _default_in_words(default: Any) -> str | None:
    if default is attrs.NOTHING:
        return None
    if hasattr(default, "factory"):  # of attrs.Factory, which may need the other options
        return "computed" if default.takes_self else repr(default.factory())
    return repr(default)


def _members(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]
