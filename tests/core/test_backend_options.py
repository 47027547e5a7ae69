"""Options of a backend: where they may be written, what types them, and that none is ever ignored in silence."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Literal

import pytest
from attrs import Factory, field, frozen, validators

from expertstream import (
    READY,
    Backend,
    BackendContractError,
    BackendOption,
    BackendUnavailable,
    Commit,
    ConfigError,
    DeclaredOption,
    MemoryRequest,
    SlotBudget,
    SlotStore,
    StreamSettings,
    hookimpl,
    load_settings,
    open_backend,
    probe_backends,
)
from expertstream.backends import GROUP


@frozen
class Options:
    """One option of each kind that a device may want."""

    headroom: MemoryRequest = field(factory=lambda: MemoryRequest.parse("1GiB"))
    copies: int = field(default=2, validator=validators.in_(range(1, 9)))
    pinned: bool = True
    mode: Literal["try", "require"] = "try"
    folder: Path | None = None
    devices: tuple[int, ...] = ()
    spare: int = Factory(lambda options: options.copies * 2, takes_self=True)


@frozen
class Required:
    """An option that nobody can guess."""

    address: str


@frozen
class OddOptions:
    """A type that no setting can be written as."""

    callback: Callable[[], None]


class Device(types.ModuleType):
    """A backend that notes in which order it is asked, and what it was configured with."""

    def __init__(self, options_class: type | None, configure: Callable[..., object] | None = None) -> None:
        super().__init__("device")
        self.asked: list[str] = []
        self.options: list[object] = []
        self.EXPERTSTREAM_CONTRACT = 1
        asked, given = self.asked, self.options

        @hookimpl
        def host_memory_is_device_addressable() -> bool:
            asked.append("host_memory_is_device_addressable")
            return True

        @hookimpl
        def budget_for_expert_size() -> SlotBudget:
            return SlotBudget(0, "nothing")

        @hookimpl
        def alloc_slot_store() -> SlotStore:
            raise NotImplementedError

        @hookimpl
        def commit_slot() -> Commit:
            return READY

        for hook in (host_memory_is_device_addressable, budget_for_expert_size, alloc_slot_store, commit_slot):
            setattr(self, hook.__name__, hook)
        if options_class is not None:

            def note(options: object) -> None:
                asked.append("configure")
                given.append(options)

            configure = configure or note
            configure.__annotations__["options"] = options_class
        if configure is not None:
            configure.__name__ = "configure"
            vars(self)["configure"] = hookimpl(configure)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make these the machine's backends: `install(name=module)`."""

    def offer(**modules: types.ModuleType) -> None:
        entries = []
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, f"device_{name}", module)
            entries.append(metadata.EntryPoint(name.replace("_dash_", "-"), f"device_{name}", GROUP))
        monkeypatch.setattr(metadata, "entry_points", lambda group: tuple(entries) if group == GROUP else ())

    return offer


Install = Callable[..., None]


def settings(
    tmp_path: Path, toml: str = "", environ: dict[str, str] | None = None, options: list[str] | None = None
) -> StreamSettings:
    file = tmp_path / "settings.toml"
    file.write_text(toml, encoding="utf-8")
    overrides: dict[str, object] = {"backends": options}
    return load_settings(
        StreamSettings, file=file, environ={"EXPERTSTREAM_BACKEND": "dev"} | (environ or {}), overrides=overrides
    )


def refusal(tmp_path: Path, *given: object) -> list[str]:
    """The lines of the error of settings or, where these pass, of opening the backend with them."""

    def start() -> None:
        opened = settings(tmp_path, *given)  # type: ignore[arg-type]  # the arguments of settings
        open_backend(opened.backend, options=opened.backends)

    with pytest.raises(ConfigError) as error:
        start()
    return str(error.value).replace(str(tmp_path), "DIR").splitlines()


def test_options_come_from_every_place_with_their_types_and_the_later_place_wins(
    tmp_path: Path, install: Install
) -> None:
    device = Device(Options)
    install(dev=device)
    given = settings(
        tmp_path,
        "[backends.dev]\nheadroom = '2GiB'\ncopies = 3\npinned = false\ndevices = [3]\nfolder = 'a b'",
        {"EXPERTSTREAM_BACKENDS__DEV__COPIES": "4", "EXPERTSTREAM_BACKENDS__DEV__DEVICES": "1, 2"},
        ["dev.copies=5", "dev.mode=require"],
    )
    open_backend(given.backend, options=given.backends)
    assert device.options == [
        Options(MemoryRequest.parse("2GiB"), 5, False, "require", Path("a b"), (1, 2), 10),
    ]


def test_a_backend_is_configured_once_before_anything_else_is_asked_also_without_any_option(install: Install) -> None:
    device = Device(Options)
    install(dev=device)
    open_backend("dev")
    assert device.asked == ["configure", "host_memory_is_device_addressable"]
    assert device.options == [Options()]


def test_options_may_be_given_in_code(install: Install) -> None:
    device = Device(Options)
    install(dev=device)
    open_backend("dev", options=[BackendOption("dev", "copies", 7)])
    assert device.options == [Options(copies=7)]
    with pytest.raises(ConfigError, match="an option in the call: '7' is not a whole number"):
        open_backend("dev", options=[BackendOption("dev", "copies", "7")])


def test_a_variable_names_a_backend_whose_name_no_variable_can_hold(tmp_path: Path, install: Install) -> None:
    device = Device(Options)
    install(my_dash_Dev=device)
    environ = {"EXPERTSTREAM_BACKEND": "my-Dev", "EXPERTSTREAM_BACKENDS__MY_DEV__COPIES": "6"}
    given = settings(tmp_path, environ=environ)
    open_backend(given.backend, options=given.backends)
    assert device.options == [Options(copies=6)]


def test_the_name_of_a_backend_may_hold_dots(tmp_path: Path) -> None:
    (option,) = settings(tmp_path, options=["my.dev.path=a=b.c"]).backends
    assert (option.backend, option.key, option.value) == ("my.dev", "path", "a=b.c")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ("[backends.dev]\n# more\ncopys = 3",),
            "'backends.dev.copys' in DIR/settings.toml, line 3 is not known; did you mean 'copies'?",
        ),
        (
            ("[backends.dev]\ncopies = '3'",),
            "'backends.dev.copies' in DIR/settings.toml, line 2: '3' is not a whole number",
        ),
        (
            ("backends.dev.copies = 0",),
            "'backends.dev.copies' in DIR/settings.toml, line 1: must be in range(1, 9) (got 0)",
        ),
        (
            ("", {"EXPERTSTREAM_BACKENDS__DEV__PINED": "true"}),
            "variable EXPERTSTREAM_BACKENDS__DEV__PINED is not known; did you mean 'pinned'?",
        ),
        (
            ("", {"EXPERTSTREAM_BACKENDS__DEV__PINNED": "yes"}),
            "variable EXPERTSTREAM_BACKENDS__DEV__PINNED: 'yes' is not true or false",
        ),
        (
            ("", {}, ["dev.mode=maybe"]),
            "option --backend-option dev.mode: 'maybe' is not one of 'try', 'require'",
        ),
        (
            ("", {}, ["dev.zzz=maybe"]),
            "option --backend-option dev.zzz is not known; known are copies, devices, folder, headroom, mode,"
            " pinned, spare",
        ),
        (
            ("[backends.dav]\nx = 3",),
            "'backends.dav.x' in DIR/settings.toml, line 2: no backend is called 'dav'; installed: dev, other;"
            " did you mean 'dev'?",
        ),
        (
            ("", {"EXPERTSTREAM_BACKENDS__DAV__X": "3"}),
            "variable EXPERTSTREAM_BACKENDS__DAV__X: no backend is called 'dav'; installed: dev, other;"
            " did you mean 'dev'?",
        ),
        (
            ("", {}, ["other.x=3"]),
            "option --backend-option other.x: backend 'other' is not selected; that is dev",
        ),
    ],
)
def test_a_wrong_option_is_refused_with_its_place_and_the_nearest_known(
    tmp_path: Path, install: Install, given: tuple[object, ...], line: str
) -> None:
    install(dev=Device(Options), other=Device(None))
    assert refusal(tmp_path, *given) == [line]


@pytest.mark.parametrize(
    ("given", "start"),
    [
        (
            ("backends = 3",),
            "'backends' in DIR/settings.toml, line 1: 3 is not a backend's option: write it in a table",
        ),
        (("[backends]\n\ndev = 3",), "'backends.dev' in DIR/settings.toml, line 1: 3 is not a backend's option"),
        (
            ("[[backends]]\nring = 3",),
            "'backends' in DIR/settings.toml, line 1: [{'ring': 3}] is not a backend's option",
        ),
        (("", {"EXPERTSTREAM_BACKENDS": "x"}), "variable EXPERTSTREAM_BACKENDS: 'x' is not a backend's option"),
        (
            ("", {"EXPERTSTREAM_BACKENDS__DEV": "x"}),
            "variable EXPERTSTREAM_BACKENDS__DEV: 'x' is not a backend's option",
        ),
        (("", {}, ["dev.copies"]), "option --backend-option dev.copies: 'dev.copies' is not a backend's option"),
        (("", {}, ["copies=3"]), "option --backend-option copies: 'copies=3' is not a backend's option"),
    ],
)
def test_what_is_no_option_of_a_backend_is_refused_with_how_to_write_one(
    tmp_path: Path, given: tuple[object, ...], start: str
) -> None:
    (line,) = refusal(tmp_path, *given)
    assert line.startswith(start)


def test_everything_wrong_with_the_options_is_told_at_once(tmp_path: Path, install: Install) -> None:
    install(dev=Device(Options))
    assert [line.partition(" in DIR")[0] for line in refusal(tmp_path, "[backends.dev]\ncopies = 99\nx = 1")] == [
        "'backends.dev.copies'",
        "'backends.dev.x'",
    ]


def test_a_table_of_a_backend_that_is_not_selected_is_left_alone_and_the_backend_not_imported(
    tmp_path: Path, install: Install
) -> None:
    install(dev=Device(None), other=types.ModuleType("empty"))
    given = settings(tmp_path, "[backends.other]\nx = 3")
    assert open_backend(given.backend, options=given.backends).name == "dev"


def remembering() -> Device:
    """A backend that keeps the options last given, as backends do, and grants as many slots as they say."""
    given: list[Options] = []

    def keep(options: Options) -> None:
        given.append(options)

    @hookimpl
    def budget_for_expert_size() -> SlotBudget:
        before = given[-1].copies
        time.sleep(0)  # lets another thread in
        return SlotBudget(before, f"{before} at first, {given[-1].copies} at last")

    device = Device(Options, keep)
    vars(device)["budget_for_expert_size"] = budget_for_expert_size
    return device


def opened_with(copies: int) -> Backend:
    return open_backend("dev", options=[BackendOption("dev", "copies", copies)])


def granted(backend: Backend) -> str:
    return backend.budget_for_expert_size(4096, 0, None).reason


def test_each_opening_goes_by_its_own_options_whatever_was_opened_or_listed_since(install: Install) -> None:
    install(dev=remembering())
    first, second = opened_with(3), opened_with(5)
    assert granted(first) == "3 at first, 3 at last"
    assert granted(second) == "5 at first, 5 at last"
    assert [status.problem for status in probe_backends([BackendOption("dev", "copies", 7)])] == [None]
    assert granted(first) == "3 at first, 3 at last"
    with pytest.raises(ConfigError):
        opened_with(99)
    assert granted(first) == "3 at first, 3 at last"


def test_openings_used_at_once_go_by_their_own_options(install: Install) -> None:
    install(dev=remembering())
    backends = {copies: opened_with(copies) for copies in (1, 2, 3, 4)}

    def ask(copies: int) -> set[str]:
        return {granted(backends[copies]) for _ in range(200)}

    with ThreadPoolExecutor(len(backends)) as threads:
        answers = dict(zip(backends, threads.map(ask, backends), strict=True))
    assert answers == {copies: {f"{copies} at first, {copies} at last"} for copies in backends}


def test_a_backend_is_configured_again_only_when_another_opening_was(install: Install) -> None:
    device = Device(Options)
    install(dev=device)
    first = opened_with(3)
    granted(first)
    assert device.options == [Options(copies=3)]
    second = opened_with(5)
    granted(second)
    granted(first)
    granted(first)
    assert device.options == [Options(copies=3), Options(copies=5), Options(copies=3)]
    assert device.options[0] is device.options[2]


def test_an_opening_whose_options_are_refused_later_says_so_and_asks_nothing(install: Install) -> None:
    refused: list[int] = []

    def configure(options: Options) -> None:
        if options.copies in refused:
            raise ConfigError(f"{options.copies} copies are too many now")

    device = Device(Options, configure)
    install(dev=device)
    first, second = opened_with(3), opened_with(5)
    refused.append(3)
    for _ in range(2):
        with pytest.raises(ConfigError, match="3 copies are too many now"):
            granted(first)
    assert granted(second) == "nothing"


def test_a_backend_without_options_refuses_any(tmp_path: Path, install: Install) -> None:
    install(dev=Device(None))
    assert refusal(tmp_path, "", {}, ["dev.x=3"]) == ["option --backend-option dev.x: backend 'dev' has no options"]


def test_an_option_that_must_be_given_is_asked_for(tmp_path: Path, install: Install) -> None:
    install(dev=Device(Required))
    assert refusal(tmp_path) == [
        "address is not set; give it as 'address' in the table [backends.dev] or as --backend-option dev.address=VALUE"
    ]


def test_a_wrong_option_stops_the_start_although_another_backend_could_be_tried(install: Install) -> None:
    install(dev=Device(Options), other=Device(None))
    with pytest.raises(ConfigError, match="did you mean 'copies'"):
        open_backend(["dev", "other"], options=[BackendOption("dev", "copys", 3)])


def test_a_backend_may_refuse_options_or_the_machine_when_it_is_configured(install: Install) -> None:
    def refuse(options: object) -> None:
        raise ConfigError("two copies of what?")

    def fail(options: object) -> None:
        raise BackendUnavailable("no such device")

    install(dev=Device(Options, refuse), gone=Device(Options, fail), other=Device(None))
    with pytest.raises(ConfigError, match="two copies"):
        open_backend(["dev", "other"])
    with pytest.raises(BackendUnavailable, match="no such device"):
        open_backend("gone")


def test_how_options_are_declared_is_checked_at_start_up(install: Install) -> None:
    def unsaid(options) -> None: ...  # type: ignore[no-untyped-def]  # wrong on purpose

    def unresolvable(options: NoSuchClass) -> None: ...  # type: ignore[name-defined]  # noqa: F821  # wrong on purpose

    def plain(options: dict[str, int]) -> None: ...

    for configure, message in (
        (unsaid, "configure does not say by the annotation of its argument"),
        (unresolvable, r"cannot be resolved at run time \(name 'NoSuchClass'.*: write configure\(options: YourOptions"),
        (plain, "configure does not say by the annotation"),
    ):
        install(dev=Device(None, configure))
        with pytest.raises(BackendContractError, match=message):
            open_backend("dev")
    install(dev=Device(OddOptions))
    with pytest.raises(BackendContractError, match="configure raised"):
        open_backend("dev", options=[BackendOption("dev", "callback", 3)])


def test_a_listing_shows_the_options_with_types_and_defaults_also_of_a_backend_that_cannot_be_used(
    install: Install,
) -> None:
    install(bare=Device(None), dev=Device(Options), need=Device(Required))
    bare, dev, need = probe_backends()
    assert bare.options == ()
    assert [(option.key, option.kind, option.default) for option in dev.options] == [
        ("headroom", "MemoryRequest", repr(MemoryRequest.parse("1GiB"))),
        ("copies", "int", "2"),
        ("pinned", "bool", "True"),
        ("mode", "Literal['try', 'require']", "'try'"),
        ("folder", "Path | None", "None"),
        ("devices", "tuple[int, ...]", "()"),
        ("spare", "int", "computed"),
    ]
    assert need.options == (DeclaredOption("address", "str", None),)
    assert "address is not set" in (need.problem or "")


def test_a_listing_gives_each_backend_its_options_and_refuses_those_of_none(install: Install) -> None:
    dev, need = Device(Options), Device(Required)
    install(dev=dev, need=need)
    statuses = probe_backends([BackendOption("need", "address", "here"), BackendOption("dev", "copys", 3)])
    assert [status.problem for status in statuses] == [
        "an option in the call is not known; did you mean 'copies'?",
        None,
    ]
    assert need.options == [Required("here")]
    with pytest.raises(ConfigError, match=r"no backend is called 'deb'.*did you mean 'dev'"):
        probe_backends([BackendOption("deb", "copies", 3)])


@pytest.mark.parametrize(
    ("toml", "environ", "names"),
    [
        ('backend = "a"', {}, "a"),
        ('backend = ["a"]', {}, "a"),
        ('backend = ["a", "b-c"]', {}, ("a", "b-c")),
        ('backend = "a, b"', {}, ("a", "b")),
        ('backend = "z"', {"EXPERTSTREAM_BACKEND": "a,b"}, ("a", "b")),
    ],
)
def test_one_backend_or_several_in_order_may_be_named(
    tmp_path: Path, toml: str, environ: dict[str, str], names: object
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(toml)
    assert load_settings(StreamSettings, file=file, environ=environ, overrides={}).backend == names


def test_an_option_names_several_backends_separated_by_commas() -> None:
    assert load_settings(StreamSettings, file=None, environ={}, overrides={"backend": "a,b"}).backend == ("a", "b")


@pytest.mark.parametrize("toml", ["[]", '""', '"a,"', '["a", ""]', '["a", "a"]', "3", "[3]", "{a = 1}"])
def test_what_names_no_backends_is_refused(tmp_path: Path, toml: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"backend = {toml}")
    with pytest.raises(ConfigError, match=r"'backend' in .*, line 1: .* is not a"):
        load_settings(StreamSettings, file=file, environ={}, overrides={})
