"""Entry points that are sound, broken in one way each, or two of a name: what is opened, refused and listed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from importlib import metadata

import pytest

from expertstream import (
    READY,
    BackendContractError,
    BackendNotFound,
    BackendUnavailable,
    Commit,
    ExpertKey,
    SlotBudget,
    SlotLayout,
    SlotPart,
    SlotStore,
    Staging,
    hookimpl,
    installed_backends,
    open_backend,
    probe_backends,
)
from expertstream.backends import GROUP

LAYOUT = SlotLayout((SlotPart("gate", 0, 4096),))


class Store:
    """As little of a store as the facade looks at."""

    def __init__(self, layout: SlotLayout, slot_count: int) -> None:
        self.layout, self.slot_count, self.closed = layout, slot_count, False

    def stage(self, slot: int) -> Staging:
        return Staging(slot, memoryview(bytearray(self.layout.slot_bytes)))

    def discard(self, staging: Staging) -> None:
        pass

    def mark_read(self, slot: int, stream: int) -> None:
        pass

    def device_view(self, slot: int) -> object:
        return b""

    def read_back(self, slot: int) -> bytes:
        return b""

    def close(self) -> None:
        self.closed = True


def sound() -> types.ModuleType:
    """A backend of the four required hooks, as a module."""
    module = types.ModuleType("sound_backend")

    @hookimpl
    def host_memory_is_device_addressable() -> bool:
        return False  # pluggy must keep a False

    @hookimpl
    def budget_for_expert_size(asked: int | None) -> SlotBudget:
        return SlotBudget(asked or 4, "made up")

    @hookimpl
    def alloc_slot_store(layout: SlotLayout, slot_count: int) -> SlotStore:
        return Store(layout, slot_count)

    @hookimpl
    def commit_slot(store: SlotStore, staging: Staging) -> Commit:
        return READY

    for hook in (host_memory_is_device_addressable, budget_for_expert_size, alloc_slot_store, commit_slot):
        setattr(module, hook.__name__, hook)
    return module


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Offer modules as the backends of the machine: `install(name=module)`; a callable raises at import."""
    entries: list[metadata.EntryPoint] = []

    class Distribution:
        """What an entry point says of the package that it comes from."""

        def __init__(self, name: str) -> None:
            self.name, self.version = name, "1.2"

    def offer(name: str, module: object, distribution: str = "some-package") -> None:
        module_name = f"offered_{name}_{len(entries)}"
        if isinstance(module, types.ModuleType):
            monkeypatch.setitem(sys.modules, module_name, module)
        entry = metadata.EntryPoint(name, module_name, GROUP)
        vars(entry)["dist"] = Distribution(distribution)
        if not isinstance(module, types.ModuleType):
            vars(entry)["load"] = module
        entries.append(entry)
        monkeypatch.setattr(metadata, "entry_points", lambda group: tuple(entries) if group == GROUP else ())

    return offer


def test_the_built_in_backend_comes_in_through_an_entry_point_like_a_strangers() -> None:
    assert [offer.distribution for offer in installed_backends()["cpu"]] == ["expertstream"]


def test_a_backend_of_the_required_hooks_alone_is_complete(install: Install) -> None:
    install("bare", sound())
    backend = open_backend("bare")
    assert backend.host_memory_is_device_addressable() is False
    assert backend.budget_for_expert_size(4096, 0, 3).slots == 3
    assert backend.alloc_slot_store(LAYOUT, 2).slot_count == 2
    assert backend.commit_slot(Store(LAYOUT, 1), Staging(0, memoryview(b""))) is READY
    keys = [ExpertKey(0, expert) for expert in range(5)]
    assert backend.seed_experts(keys, 2) == keys[:2]
    assert backend.describe_device().name


def test_an_unknown_backend_is_refused_with_what_is_installed_and_the_nearest(install: Install) -> None:
    install("bare", sound())
    with pytest.raises(BackendNotFound, match=r"'bear'.*installed: bare; did you mean 'bare'"):
        open_backend("bear")


def test_two_distributions_of_one_name_are_refused_naming_both(install: Install) -> None:
    install("twin", sound(), "first-package")
    install("twin", sound(), "second-package")
    with pytest.raises(BackendContractError, match=r"first-package 1\.2 and second-package 1\.2; uninstall"):
        open_backend("twin")


def test_a_backend_is_not_imported_unless_it_is_opened_or_probed(install: Install) -> None:
    imported = []
    install("other", lambda: imported.append("other"))
    install("bare", sound())
    installed_backends()
    open_backend("bare")
    assert imported == []


@pytest.mark.parametrize(
    "error", [ImportError("libfoo is missing"), OSError("no .so"), RuntimeError("x"), SystemExit(3)]
)
def test_a_broken_import_is_named_and_hides_no_other_backend(install: Install, error: BaseException) -> None:
    def fail() -> None:
        raise error

    install("broken", fail)
    install("bare", sound())
    with pytest.raises(BackendUnavailable, match=r"'broken'.*some-package 1\.2.*cannot be imported"):
        open_backend("broken")
    problems = {status.offer.name: status.problem for status in probe_backends()}
    assert problems["bare"] is None
    assert str(error) in (problems["broken"] or "")


def test_an_entry_point_that_is_none_is_refused(install: Install) -> None:
    install("nothing", lambda: None)
    with pytest.raises(BackendContractError, match="is None"):
        open_backend("nothing")


def break_missing(module: types.ModuleType) -> str:
    del module.commit_slot
    return "lacks the hooks commit_slot; write them"


def break_unmarked(module: types.ModuleType) -> str:
    def commit_slot(store: SlotStore, staging: Staging) -> Commit:
        return READY

    vars(module)["commit_slot"] = commit_slot
    return "lacks the hooks commit_slot; mark commit_slot with @hookimpl"


def break_misspelt(module: types.ModuleType) -> str:
    vars(module)["comit_slot"] = hookimpl(lambda: READY)
    return "comit_slot"


def break_foreign_argument(module: types.ModuleType) -> str:
    @hookimpl
    def commit_slot(store: SlotStore, stagging: Staging) -> Commit:
        return READY

    vars(module)["commit_slot"] = commit_slot
    return "stagging"


def break_default(module: types.ModuleType) -> str:
    @hookimpl
    def budget_for_expert_size(expert_bytes: int, asked: int | None = None) -> SlotBudget:
        return SlotBudget(1, "one")

    vars(module)["budget_for_expert_size"] = budget_for_expert_size
    return "defaults for asked"


@pytest.mark.parametrize(
    "break_it", [break_missing, break_unmarked, break_misspelt, break_foreign_argument, break_default]
)
def test_hooks_that_break_the_contract_are_refused_at_start_up(
    install: Install, break_it: Callable[[types.ModuleType], str]
) -> None:
    module = sound()
    message = break_it(module)
    install("broken", module)
    with pytest.raises(BackendContractError, match=message):
        open_backend("broken")


@pytest.mark.parametrize(
    ("hook", "answer", "message"),
    [
        ("host_memory_is_device_addressable", 1, "returned 1, not a bool"),
        ("budget_for_expert_size", 3, "returned 3, not a SlotBudget"),
        ("budget_for_expert_size", SlotBudget(9, "more"), "granted 9 slots, 3 were asked for"),
        ("alloc_slot_store", None, "alloc_slot_store returned None"),
        ("alloc_slot_store", Store(LAYOUT, 1), "made 1 slots"),
        ("commit_slot", None, "commit_slot returned None; return READY"),
        ("seed_experts", (ExpertKey(0, 0), ExpertKey(0, 0)), "1 of them distinct"),
        ("seed_experts", (ExpertKey(5, 5),), "1 not in the list"),
        ("seed_experts", 7, "not a Sequence"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_named(install: Install, hook: str, answer: object, message: str) -> None:
    module = sound()
    vars(module)[hook] = hookimpl(_named(hook, answer))
    install("broken", module)
    backend = open_backend("broken")
    calls: dict[str, Callable[[], object]] = {
        "host_memory_is_device_addressable": backend.host_memory_is_device_addressable,
        "budget_for_expert_size": lambda: backend.budget_for_expert_size(4096, 0, 3),
        "alloc_slot_store": lambda: backend.alloc_slot_store(LAYOUT, 2),
        "commit_slot": lambda: backend.commit_slot(Store(LAYOUT, 1), Staging(0, memoryview(b""))),
        "seed_experts": lambda: backend.seed_experts([ExpertKey(0, 0), ExpertKey(0, 1)], 2),
    }
    with pytest.raises(BackendContractError, match=message):
        calls[hook]()


def _named(hook: str, answer: object) -> Callable[[], object]:
    def implementation() -> object:
        return answer

    implementation.__name__ = hook
    return implementation


def test_observers_see_the_calls_of_the_backend(install: Install) -> None:
    seen: list[tuple[Sequence[ExpertKey], int]] = []

    class Watch:
        """Notes what the seeding was asked."""

        @hookimpl(wrapper=True)
        def seed_experts(self, hottest: Sequence[ExpertKey], slot_count: int):  # type: ignore[no-untyped-def]  # a wrapper
            seen.append((hottest, slot_count))
            return (yield)

    install("bare", sound())
    backend = open_backend("bare", [Watch()])
    backend.seed_experts([], 3)
    assert seen == [([], 3)]
