"""Entry points that are sound, broken in one way each, or two of a name: what is opened, refused and listed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata

import pytest
from structlog.testing import capture_logs

from expertstream import (
    READY,
    Backend,
    BackendContractError,
    BackendNotFound,
    BackendUnavailable,
    Commit,
    DeviceOutOfMemory,
    ExpertKey,
    SlotBudget,
    SlotLayout,
    SlotPart,
    SlotStore,
    Staging,
    UsageError,
    hookimpl,
    installed_backends,
    open_backend,
    probe_backends,
)
from expertstream.backends import GROUP

LAYOUT = SlotLayout((SlotPart("gate", 0, 4096),))
TWO_PARTS = SlotLayout((SlotPart("gate", 0, 4096), SlotPart("down", 4096, 4096)))


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


class HalfAStore:
    """Someone's store, begun."""

    layout, slot_count = LAYOUT, 2

    def stage(self, slot: int) -> Staging:
        return Staging(slot, memoryview(b""))


def sound() -> types.ModuleType:
    """A backend of the four required hooks, as a module."""
    module = types.ModuleType("sound_backend")
    vars(module)["EXPERTSTREAM_CONTRACT"] = 1

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
    assert backend.describe_device().dlpack_type == 1
    assert backend.launch_read(Store(LAYOUT, 1), 0, 0, 5) is None
    assert backend.implemented == {
        *("host_memory_is_device_addressable", "budget_for_expert_size", "alloc_slot_store", "commit_slot")
    }


def test_an_unknown_backend_is_refused_with_what_is_installed_and_the_nearest(install: Install) -> None:
    install("bare", sound())
    with pytest.raises(BackendNotFound, match=r"'bear'.*installed: bare; did you mean 'bare'"):
        open_backend("bear")


def test_two_distributions_of_one_name_are_refused_naming_both(install: Install) -> None:
    install("twin", sound(), "first-package")
    install("twin", sound(), "second-package")
    with pytest.raises(
        BackendContractError, match=r"first-package 1\.2 \(.*\) and second-package 1\.2 \(.*\): uninstall"
    ):
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
    with pytest.raises(BackendUnavailable, match=r"'broken'.*some-package 1\.2.*cannot be imported") as refusal:
        open_backend("broken")
    assert refusal.value.__cause__ is error  # with the traceback of the plugin's own lines
    problems = {status.offer.name: status.problem for status in probe_backends()}
    assert problems["bare"] is None
    assert str(error) in (problems["broken"] or "")


def test_an_entry_point_that_is_none_is_refused(install: Install) -> None:
    install("nothing", lambda: None)
    with pytest.raises(BackendContractError, match="is None"):
        open_backend("nothing")


Break = Callable[[types.ModuleType], None]


def without(name: str) -> Break:
    return lambda module: delattr(module, name)


def with_hook(function: Callable[..., object], *, marked: bool = True, instead_of: str = "") -> Break:
    """Adds the function under its own name, in place of `instead_of`."""

    def change(module: types.ModuleType) -> None:
        if instead_of:
            delattr(module, instead_of)
        assert isinstance(function, types.FunctionType)
        fresh = types.FunctionType(
            function.__code__, globals(), function.__name__, function.__defaults__, function.__closure__
        )  # a mark would stay on the function for the next test
        vars(module)[function.__name__] = hookimpl(fresh) if marked else fresh

    return change


def stating(version: object) -> Break:
    return lambda module: vars(module).update(EXPERTSTREAM_CONTRACT=version)


def commit_slot(store: SlotStore, staging: Staging) -> Commit:
    return READY


def comit_slot(store: SlotStore, staging: Staging) -> Commit:
    return READY


def discribe_device() -> None: ...


def frobnicate() -> None: ...


def describe_device() -> None: ...


def _foreign_argument() -> Break:
    def commit_slot(store: SlotStore, stagging: Staging) -> Commit:
        return READY

    return with_hook(commit_slot)


def _unlike_argument() -> Break:
    def commit_slot(self: object, queue: int) -> Commit:
        return READY

    return with_hook(commit_slot)


def _default() -> Break:
    def budget_for_expert_size(expert_bytes: int, asked: int | None = None) -> SlotBudget:
        return SlotBudget(1, "one")

    return with_hook(budget_for_expert_size)


def _open_arguments() -> Break:
    def seed_experts(**everything: object) -> tuple[ExpertKey, ...]:
        return ()

    return with_hook(seed_experts)


def _keyword_only() -> Break:
    def seed_experts(*, slot_count: int) -> tuple[ExpertKey, ...]:
        return ()

    return with_hook(seed_experts)


def _wrapper() -> Break:
    def commit_slot(store: SlotStore, staging: Staging):  # type: ignore[no-untyped-def]  # a wrapper
        return (yield)

    return lambda module: vars(module).update(commit_slot=hookimpl(wrapper=True)(commit_slot))


def _renamed() -> Break:
    """The specname that pluggy offers is a way to misspell a hook too."""
    return lambda module: vars(module).update(commit=hookimpl(specname="commit_slott")(commit_slot))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (without("commit_slot"), "the hook commit_slot is missing: write it and mark it with @hookimpl"),
        (with_hook(commit_slot, marked=False), "commit_slot is not marked, so it would never be called: mark it"),
        (with_hook(describe_device, marked=False), "describe_device is not marked, so it would never be called"),
        (with_hook(comit_slot, instead_of="commit_slot"), "comit_slot is not a hook: rename it commit_slot"),
        (with_hook(comit_slot, marked=False, instead_of="commit_slot"), "if it is comit_slot, rename that and mark it"),
        (with_hook(discribe_device), "discribe_device is not a hook: rename it describe_device"),
        (with_hook(frobnicate), "frobnicate is not a hook: hooks are host_memory_is_device_addressable, budget_"),
        (_renamed(), "commit_slott is not a hook: rename it"),
        (_foreign_argument(), "commit_slot takes stagging, an argument that .*: did you mean staging?"),
        (_unlike_argument(), r"commit_slot takes queue, an argument that .*: the hook has \(store, staging\)"),
        (_default(), "budget_for_expert_size has a default for asked, which would .*: remove the default"),
        (_open_arguments(), r"seed_experts takes \*\*everything.*: write .* \(hottest, slot_count\)"),
        (_keyword_only(), "seed_experts takes slot_count.*, which is never passed"),
        (_wrapper(), "commit_slot is marked as a wrapper"),
        (without("EXPERTSTREAM_CONTRACT"), "does not state the contract .* write EXPERTSTREAM_CONTRACT = 1 in it"),
        (stating(2), "was written for contract 2, and this is contract 1: install a version of some-package for"),
        (stating(True), "was written for contract True, and this is contract 1"),
        (stating("1"), "was written for contract '1', and this is contract 1"),
    ],
)
def test_what_breaks_the_contract_is_refused_at_start_up_with_its_source_and_the_remedy(
    install: Install, break_it: Break, message: str
) -> None:
    module = sound()
    break_it(module)
    install("broken", module)
    with pytest.raises(BackendContractError, match=message) as refusal:
        open_backend("broken")
    assert "backend 'broken' (entry point 'offered_broken_0' of some-package 1.2)" in str(refusal.value)


def test_everything_that_breaks_the_contract_is_told_at_once_and_no_hook_has_run(install: Install) -> None:
    module = sound()
    _default()(module)
    without("commit_slot")(module)
    vars(module)["host_memory_is_device_addressable"] = hookimpl(_named("host_memory_is_device_addressable", None))
    install("broken", module)
    with pytest.raises(BackendContractError, match=r"commit_slot is missing.*; budget_for_expert_size has a default"):
        open_backend("broken")


@pytest.mark.parametrize(
    ("hook", "answer", "message"),
    [
        ("host_memory_is_device_addressable", 1, "returned 1, not a bool"),
        ("host_memory_is_device_addressable", None, "host_memory_is_device_addressable returned None, not a bool"),
        ("describe_device", None, "describe_device returned None, not a DeviceDescription"),  # not the default's answer
        ("describe_device", "a device", "returned 'a device', not a DeviceDescription"),
        ("budget_for_expert_size", None, "budget_for_expert_size returned None, not a SlotBudget"),
        ("budget_for_expert_size", 3, r"returned 3, not a SlotBudget; expertstream\.hookspecs\.budget_for_"),
        ("budget_for_expert_size", SlotBudget(9, "more"), "granted 9 slots, 3 were asked for"),
        ("alloc_slot_store", None, "alloc_slot_store returned None"),
        (
            "alloc_slot_store",
            HalfAStore(),
            "not a SlotStore; it lacks discard, mark_read, device_view, read_back, close",
        ),
        ("alloc_slot_store", Store(LAYOUT, 1), "made 1 slots"),
        ("alloc_slot_store", Store(TWO_PARTS, 2), "made 2 slots of 8192 bytes, not 2 of 4096"),
        ("commit_slot", None, "commit_slot returned None, not a Commit; return READY where"),
        ("commit_slot", True, "commit_slot returned True, not a Commit; it lacks done, wait, order_before"),
        ("seed_experts", None, "seed_experts returned None, not a Sequence"),  # not the default's answer
        ("launch_read", None, "launch_read returned None, not a Callable"),
        ("seed_experts", (ExpertKey(0, 0), ExpertKey(0, 0)), "1 of them distinct"),
        ("seed_experts", (ExpertKey(5, 5),), "1 not in the list"),
        ("seed_experts", 7, "not a Sequence"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_named(install: Install, hook: str, answer: object, message: str) -> None:
    module = sound()
    vars(module)[hook] = hookimpl(_named(hook, answer))
    install("broken", module)
    calls: dict[str, Callable[[Backend], object]] = {
        "budget_for_expert_size": lambda backend: backend.budget_for_expert_size(4096, 0, 3),
        "alloc_slot_store": lambda backend: backend.alloc_slot_store(LAYOUT, 2),
        "commit_slot": lambda backend: backend.commit_slot(Store(LAYOUT, 1), Staging(0, memoryview(b""))),
        "seed_experts": lambda backend: backend.seed_experts([ExpertKey(0, 0), ExpertKey(0, 1)], 2),
        "launch_read": lambda backend: backend.launch_read(Store(LAYOUT, 1), 0, 0, 5),
    }
    with pytest.raises(BackendContractError, match=message) as refusal:
        calls.get(hook, Backend.describe_device)(open_backend("broken"))  # opening refuses what it asks itself
    assert "backend 'broken' (entry point 'offered_broken_0' of some-package 1.2)" in str(refusal.value)


def _named(hook: str, answer: object) -> Callable[[], object]:
    def implementation() -> object:
        return answer

    implementation.__name__ = hook
    return implementation


@pytest.mark.parametrize("addressable", [True, False])
def test_staging_beside_slots_that_are_it_breaks_the_contract(install: Install, addressable: bool) -> None:
    module = sound()
    for hook, answer in (
        ("host_memory_is_device_addressable", addressable),
        ("budget_for_expert_size", SlotBudget(3, "three fit", staging_bytes=5)),
    ):
        vars(module)[hook] = hookimpl(_named(hook, answer))
    install("staged", module)
    backend = open_backend("staged")
    if addressable:
        with pytest.raises(BackendContractError, match="told of 5 bytes of staging beside the slots"):
            backend.budget_for_expert_size(4096, 0, 3)
    else:
        assert backend.budget_for_expert_size(4096, 0, 3).staging_bytes == 5


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


class Misspelt:
    """Watches a hook that does not exist."""

    @hookimpl(wrapper=True)
    def comit_slot(self) -> Iterator[None]:
        yield


class Unmarked:
    """Watches nothing."""

    def commit_slot(self) -> Iterator[None]:
        yield


class Defaulting:
    """Watches with an argument that is never passed."""

    @hookimpl(wrapper=True)
    def commit_slot(self, staging: Staging | None = None) -> Iterator[None]:
        yield


@pytest.mark.parametrize(
    ("observer", "problem"),
    [
        (Misspelt(), r"comit_slot is not a hook: rename it commit_slot"),
        (Unmarked(), r"commit_slot is not marked"),
        (Defaulting(), r"commit_slot has a default for staging"),
    ],
)
def test_an_observer_whose_hook_would_never_be_called_is_refused(
    install: Install, observer: object, problem: str
) -> None:
    install("bare", sound())
    with pytest.raises(UsageError, match=rf"observer <.*{problem}"):
        open_backend("bare", [observer])


def test_a_hook_that_lets_a_foreign_error_escape_is_named_at_start_up(install: Install) -> None:
    module = sound()
    vars(module)["describe_device"] = hookimpl(_raising("describe_device", RuntimeError("driver says 999")))
    install("leaky", module)
    with pytest.raises(BackendContractError, match=r"describe_device raised RuntimeError: driver says 999"):
        open_backend("leaky")


def test_a_device_that_fails_while_it_is_opened_gives_the_next_backend_its_turn(install: Install) -> None:
    module = sound()
    vars(module)["describe_device"] = hookimpl(_raising("describe_device", DeviceOutOfMemory("the device is full")))
    install("full", module)
    install("bare", sound())
    with capture_logs() as events:
        assert open_backend(["full", "bare"]).name == "bare"
    assert [event["reason"] for event in events if event["event"] == "backend_refused"] == ["the device is full"]
    with pytest.raises(DeviceOutOfMemory, match="the device is full"):
        open_backend("full")


def test_the_backend_is_asked_once_whether_host_memory_is_addressable(install: Install) -> None:
    asked = []

    def host_memory_is_device_addressable() -> bool:
        asked.append(True)
        return False

    module = sound()
    with_hook(host_memory_is_device_addressable)(module)
    install("bare", module)
    backend = open_backend("bare")
    assert [backend.host_memory_is_device_addressable() for _ in range(3)] == [False] * 3
    assert len(asked) == 1


def test_a_read_that_a_backend_launches_is_handed_through(install: Install) -> None:
    def launch_read(slot: int, after_ms: int) -> Callable[[], bytes]:
        return lambda: bytes([slot, after_ms])

    module = sound()
    with_hook(launch_read)(module)
    install("bare", module)
    read = open_backend("bare").launch_read(Store(LAYOUT, 1), 3, 0, 5)
    assert read is not None
    assert read() == bytes([3, 5])


def _raising(hook: str, error: BaseException) -> Callable[[], object]:
    def implementation() -> object:
        raise error

    implementation.__name__ = hook
    return implementation


def _without_device(reason: str) -> types.ModuleType:
    module = sound()
    failing = _raising("host_memory_is_device_addressable", BackendUnavailable(reason))
    vars(module)["host_memory_is_device_addressable"] = hookimpl(failing)
    return module


def test_of_several_backends_the_first_usable_one_is_opened_and_every_refusal_is_logged(install: Install) -> None:
    install("absent", _without_device("no device of that kind"))
    install("unmarked", types.ModuleType("empty"))
    install("bare", sound())
    install("other", sound())
    with capture_logs() as events:
        assert open_backend(["bar", "absent", "unmarked", "bare", "other"]).name == "bare"
    assert [(event["event"], event["log_level"], event["backend"]) for event in events] == [
        ("backend_refused", "warning", "bar"),
        ("backend_refused", "warning", "absent"),
        ("backend_refused", "warning", "unmarked"),
    ]
    assert "did you mean 'bare'" in events[0]["reason"]
    assert events[1]["reason"] == "no device of that kind"
    assert "some-package 1.2" in events[2]["reason"]


def test_a_backend_after_the_usable_one_is_never_imported(install: Install) -> None:
    imported = []
    install("bare", sound())
    install("other", lambda: imported.append("other"))
    open_backend(("bare", "other"))
    assert imported == []


def test_when_all_are_refused_one_error_gives_every_reason(install: Install) -> None:
    install("first", _without_device("no driver"))
    install("second", types.ModuleType("empty"))
    with capture_logs() as events, pytest.raises(BackendUnavailable) as refusal:
        open_backend(["first", "second", "third"])
    message = str(refusal.value)
    assert "first: no driver" in message
    assert "second: backend 'second' (entry point 'offered_second_1' of some-package 1.2) does not state" in message
    assert "third: no backend is called 'third'" in message
    assert len(events) == 3


def test_several_names_that_are_all_unknown_are_a_fault_of_the_configuration(install: Install) -> None:
    with capture_logs(), pytest.raises(BackendNotFound, match="none of the backends named"):
        open_backend(["first", "second"])
    install("bare", sound())
    with pytest.raises(BackendNotFound, match="no backend is named; installed: bare"):
        open_backend([])


def test_a_backend_without_its_device_is_refused_alone_and_listed_with_the_reason(install: Install) -> None:
    install("absent", _without_device("no driver"))
    with pytest.raises(BackendUnavailable, match="no driver"):
        open_backend("absent")
    (status,) = probe_backends()
    assert (status.problem, status.device, status.addressable) == ("no driver", None, None)


def test_a_listing_shows_every_broken_backend_beside_the_sound_one(install: Install) -> None:
    def fail() -> None:
        raise SystemExit(3)

    unversioned, misanswering, raising = sound(), sound(), sound()
    without("EXPERTSTREAM_CONTRACT")(unversioned)
    vars(misanswering)["describe_device"] = hookimpl(_named("describe_device", 3))
    vars(raising)["describe_device"] = hookimpl(_raising("describe_device", ZeroDivisionError("oh")))
    for name, module in (
        *(("import", fail), ("unversioned", unversioned), ("misanswering", misanswering), ("raising", raising)),
        *(("twin", sound()), ("twin", sound()), ("nothing", lambda: None), ("bare", sound())),
    ):
        install(name, module)
    usable = {status.offer.name: status.problem is None for status in probe_backends()}
    assert usable == dict.fromkeys(("import", "misanswering", "nothing", "raising", "twin", "unversioned"), False) | {
        "bare": True
    }


@pytest.mark.parametrize("hook", ["alloc_slot_store", "commit_slot", "budget_for_expert_size"])
def test_what_a_hook_raises_of_its_own_names_backend_and_hook(install: Install, hook: str) -> None:
    def fail() -> None:
        raise OSError(12, "ioctl")

    fail.__name__ = hook
    module = sound()
    vars(module)[hook] = hookimpl(fail)
    install("broken", module)
    backend = open_backend("broken")
    calls: dict[str, Callable[[], object]] = {
        "alloc_slot_store": lambda: backend.alloc_slot_store(LAYOUT, 2),
        "commit_slot": lambda: backend.commit_slot(Store(LAYOUT, 1), Staging(0, memoryview(b""))),
        "budget_for_expert_size": lambda: backend.budget_for_expert_size(4096, 0, 3),
    }
    with pytest.raises(BackendContractError, match=rf"'broken'.*{hook} raised OSError: .*ioctl"):
        calls[hook]()
