"""A setting means what was written, and a wrong one names the place where it was written."""

import os
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from attrs import field, frozen, validators

from expertstream.config import IoMode, StreamSettings, load_settings
from expertstream.errors import ConfigError
from expertstream.units import MemoryRequest


class Shape(Enum):
    ROUND = "round"
    FLAT = "flat"


@frozen(kw_only=True)
class EveryKind(StreamSettings):
    """A subclass with one field of every kind of type, as an engine may write it."""

    count: int = 1
    ratio: float = 0.5
    loud: bool = False
    maybe: bool | None = None
    folder: Path | None = None
    shape: Shape = Shape.ROUND
    mode: Literal["fast", "safe"] = "safe"
    stops: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    top_k: int | None = field(default=None, validator=validators.optional(validators.ge(0)))


def load(
    tmp_path: Path,
    toml: str | None = None,
    environ: dict[str, str] | None = None,
    overrides: dict[str, object] | None = None,
) -> EveryKind:
    file = None
    if toml is not None:
        file = tmp_path / "settings.toml"
        file.write_text(toml, encoding="utf-8")
    return load_settings(EveryKind, file=file, environ=environ or {}, overrides={"backend": "b", **(overrides or {})})


def refusal(
    tmp_path: Path,
    toml: str | None = None,
    environ: dict[str, str] | None = None,
    overrides: dict[str, object] | None = None,
) -> str:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, toml, environ, overrides)
    return str(error.value).replace(str(tmp_path), "DIR")


def test_defaults_hold_where_nothing_is_given() -> None:
    assert load_settings(StreamSettings, file=None, environ={}, overrides={"backend": "b"}) == StreamSettings(
        backend="b",
        expert_memory=None,
        policy="hotness",
        io_mode="auto",
        filler_threads=8,
        half_life_tokens=None,
        read_timeout_s=120,
    )


def test_an_option_beats_a_variable_and_a_variable_beats_the_file(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        "filler_threads = 1\nhalf_life_tokens = 2\nread_timeout_s = 3",
        {"EXPERTSTREAM_FILLER_THREADS": "10", "EXPERTSTREAM_HALF_LIFE_TOKENS": "20"},
        {"filler_threads": 33, "half_life_tokens": None},
    )
    assert (settings.filler_threads, settings.half_life_tokens, settings.read_timeout_s) == (33, 20, 3)


def test_other_variables_are_none_of_our_business(tmp_path: Path) -> None:
    assert load(tmp_path, environ={"HOME": "x", "MY_EXPERTSTREAM_COUNT": "x"}).count == 1


def test_the_file_gives_every_kind_of_value(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        expert_memory = "12.5%"
        count = -3
        ratio = 2
        loud = true
        maybe = false
        folder = "a b"
        shape = "flat"
        mode = "fast"
        stops = ["a,b", ""]
        sizes = [1, 2]
        top_k = 0
        """,
    )
    assert settings == EveryKind(
        backend="b",
        expert_memory=MemoryRequest.parse("12.5%"),
        count=-3,
        ratio=2.0,
        loud=True,
        maybe=False,
        folder=Path("a b"),
        shape=Shape.FLAT,
        mode="fast",
        stops=("a,b", ""),
        sizes=(1, 2),
        top_k=0,
    )
    assert type(settings.ratio) is float


def test_a_variable_gives_every_kind_of_value(tmp_path: Path) -> None:
    texts = {
        "EXPERT_MEMORY": "20 GB",
        "COUNT": "-3",
        "RATIO": "2e-1",
        "LOUD": "true",
        "MAYBE": "false",
        "FOLDER": "a b",
        "SHAPE": "flat",
        "MODE": "fast",
        "STOPS": "a, b",
        "SIZES": "1,2",
        "TOP_K": "7",
    }
    settings = load(tmp_path, environ={f"EXPERTSTREAM_{name}": text for name, text in texts.items()})
    assert settings == EveryKind(
        backend="b",
        expert_memory=MemoryRequest(size_bytes=20 * 10**9),
        count=-3,
        ratio=0.2,
        loud=True,
        maybe=False,
        folder=Path("a b"),
        shape=Shape.FLAT,
        mode="fast",
        stops=("a", "b"),
        sizes=(1, 2),
        top_k=7,
    )


def test_an_option_may_be_text_or_already_the_object(tmp_path: Path) -> None:
    request = MemoryRequest.parse("25%")
    for memory in ("25%", request):
        for shape in ("flat", Shape.FLAT):
            settings = load(
                tmp_path, overrides={"expert_memory": memory, "shape": shape, "folder": Path("x"), "stops": ("a",)}
            )
            assert settings.expert_memory == request
            assert (settings.shape, settings.folder, settings.stops) == (Shape.FLAT, Path("x"), ("a",))


def test_expert_memory_may_be_a_plain_number_of_bytes(tmp_path: Path) -> None:
    assert load(tmp_path, f"expert_memory = {2**53 + 1}").expert_memory == MemoryRequest(size_bytes=2**53 + 1)
    assert load(tmp_path, environ={"EXPERTSTREAM_EXPERT_MEMORY": f"{2**53 + 1}"}).expert_memory == MemoryRequest(
        size_bytes=2**53 + 1
    )


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        (
            f"stops = {'[' * 20_000}{']' * 20_000}",
            "configuration file DIR/settings.toml nests tables or lists too deeply",
        ),
        (f"stops = {'{a = ' * 20_000}1{'}' * 20_000}", "configuration file DIR/settings.toml nests"),
        (f"filler_threads{'.a' * 2_000} = 1", "'filler_threads' in DIR/settings.toml, line 1: {'a': {'a': "),
    ],
)
def test_a_file_that_nests_too_deeply_is_refused(tmp_path: Path, toml: str, says: str) -> None:
    assert refusal(tmp_path, toml).startswith(says)


@pytest.mark.parametrize(("name", "most"), [("read_timeout_s", 86_400), ("half_life_tokens", 10**9)])
def test_a_number_has_a_most_that_the_machine_can_count_to(tmp_path: Path, name: str, most: int) -> None:
    variable = f"EXPERTSTREAM_{name.upper()}"
    assert getattr(load(tmp_path, environ={variable: str(most)}), name) == most
    assert f"1 to {most}" in refusal(tmp_path, environ={variable: "999999999999999999"})


@pytest.mark.parametrize("io_mode", ["auto", "direct", "buffered"])
def test_every_io_mode_can_be_written(tmp_path: Path, io_mode: IoMode) -> None:
    assert load(tmp_path, f'io_mode = "{io_mode}"').io_mode == io_mode


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("filler_threads = 8.0", "8.0 is not a whole number"),
        ('filler_threads = "8"', "'8' is not a whole number"),
        ("filler_threads = true", "True is not a whole number"),
        ("filler_threads = 0", "0 is not a whole number from 1 to 64"),
        ("filler_threads = 65", "65 is not a whole number from 1 to 64"),
        ("half_life_tokens = 0", "0 is not a whole number from 1 to 1000000000"),
        ("read_timeout_s = -1", "-1 is not a whole number from 1 to 86400"),
        ("top_k = -1", "must be >= 0: -1"),
        ("loud = 1", "1 is not true or false"),
        ('loud = "true"', "'true' is not true or false"),
        ("ratio = true", "True is not a finite number"),
        (f"ratio = {10**400}", f"{10**400} is not a finite number"),
        ("ratio = nan", "nan is not a finite number"),
        ('ratio = "1.5"', "'1.5' is not a finite number"),
        ("policy = 3", "3 is not a text"),
        ('policy = ""', "Length of 'policy' must be >= 1: 0"),
        ('io_mode = "fast"', "'fast' is not one of 'auto', 'direct', 'buffered'"),
        ("io_mode = true", "True is not one of 'auto', 'direct', 'buffered'"),
        ('shape = "square"', "'square' is not one of 'round', 'flat'"),
        ("folder = 3", "3 is not a path"),
        ('folder = ""', "'' is not a path"),
        ('stops = "ab"', "'ab' is not a list"),
        ("stops = [1]", "1 is not a text"),
        ("sizes = [1, true]", "True is not a whole number"),
        ("expert_memory = 1.5", "1.5 is not an amount of memory, such as"),
        ("expert_memory = true", "True is not an amount of memory, such as"),
        ("expert_memory = -1", "-1 is not an amount of memory, such as"),
        ('expert_memory = "8 XB"', "'8 XB' is not an amount of memory; what can be written: bytes"),
        ("expert_memory = 2026-01-01", "datetime.date(2026, 1, 1) is not an amount of memory"),
    ],
)
def test_a_wrong_value_in_the_file_names_file_line_and_key(tmp_path: Path, line: str, complaint: str) -> None:
    key = line.split(" = ")[0]
    assert refusal(tmp_path, f"# a comment\n\n{line}\n").startswith(
        f"'{key}' in DIR/settings.toml, line 3: {complaint}"
    )


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("FILLER_THREADS", "8.0", "'8.0' is not a whole number"),
        ("FILLER_THREADS", "true", "'true' is not a whole number"),
        ("FILLER_THREADS", "", "'' is not a whole number"),
        ("FILLER_THREADS", " 8", "' 8' is not a whole number"),
        ("FILLER_THREADS", "1_0", "'1_0' is not a whole number"),
        ("FILLER_THREADS", "٨", "'٨' is not a whole number"),
        ("FILLER_THREADS", "9" * 5000, "'999"),
        ("FILLER_THREADS", "65", "65 is not a whole number from 1 to 64"),
        ("LOUD", "1", "'1' is not true or false"),
        ("LOUD", "True", "'True' is not true or false"),
        ("RATIO", "fast", "'fast' is not a number"),
        ("RATIO", "inf", "inf is not a finite number"),
        ("MODE", "", "'' is not one of 'fast', 'safe'"),
        ("SHAPE", "ROUND", "'ROUND' is not one of 'round', 'flat'"),
        ("SIZES", "1,,2", "'' is not a whole number"),
        ("EXPERT_MEMORY", "", "'' is not an amount of memory"),
        ("EXPERT_MEMORY", "101%", "'101%' is more than all experts"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    assert refusal(tmp_path, environ={f"EXPERTSTREAM_{name}": text}).startswith(
        f"variable EXPERTSTREAM_{name}: {complaint}"
    )


def test_a_wrong_option_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path, overrides={"filler_threads": 65}) == (
        "option --filler-threads: 65 is not a whole number from 1 to 64"
    )


@pytest.mark.parametrize(
    ("toml", "environ", "overrides", "complaint"),
    [
        (
            "expert_memroy = 3",
            {},
            {},
            "'expert_memroy' in DIR/settings.toml, line 1 is not known; did you mean 'expert_memory'?",
        ),
        (
            "expert-memory = 3",
            {},
            {},
            "'expert-memory' in DIR/settings.toml, line 1 is not known; did you mean 'expert_memory'?",
        ),
        (
            "",
            {"EXPERTSTREAM_EXPERT_MEM": "1"},
            {},
            "variable EXPERTSTREAM_EXPERT_MEM is not known; did you mean EXPERTSTREAM_EXPERT_MEMORY?",
        ),
        (
            "",
            {"EXPERTSTREAM_expert_memory": "1"},
            {},
            "variable EXPERTSTREAM_expert_memory is not known; did you mean EXPERTSTREAM_EXPERT_MEMORY?",
        ),
        ("", {}, {"expert_memmory": "1"}, "option --expert-memmory is not known; did you mean 'expert_memory'?"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(
    tmp_path: Path, toml: str, environ: dict[str, str], overrides: dict[str, object], complaint: str
) -> None:
    assert refusal(tmp_path, toml, environ, overrides) == complaint


def test_an_option_that_is_no_setting_is_told_from_an_unknown_one(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("max_tokens = 3\n")
    environ = {"EXPERTSTREAM_MAX_TOKENS": "3"}
    with pytest.raises(ConfigError) as refused:
        load_settings(EveryKind, file=file, environ=environ, overrides={}, options_only={"max_tokens"})
    assert str(refused.value).splitlines()[:2] == [
        f"{source} is no setting; max_tokens can only be given as an option of the command line"
        for source in (f"'max_tokens' in {file}, line 1", "variable EXPERTSTREAM_MAX_TOKENS")
    ]


def test_a_name_like_no_other_is_refused_with_all_known_ones(tmp_path: Path) -> None:
    for environ in ({"EXPERTSTREAM_ZZZ": ""}, {"EXPERTSTREAM_": ""}):
        assert "known are EXPERTSTREAM_BACKEND, EXPERTSTREAM_BACKENDS, EXPERTSTREAM_COUNT" in refusal(
            tmp_path, environ=environ
        )
    assert "known are backend, backends, count" in refusal(tmp_path, "zzz = 1\n")


def test_everything_wrong_is_told_at_once_also_what_a_later_place_replaces(tmp_path: Path) -> None:
    assert refusal(
        tmp_path,
        "filler_threads = 0\nspeed = 9000\n",
        {"EXPERTSTREAM_FILLER_THREADS": "many"},
        {"filler_threads": 8, "count": "x"},
    ).splitlines() == [
        "'filler_threads' in DIR/settings.toml, line 1: 0 is not a whole number from 1 to 64",
        "'speed' in DIR/settings.toml, line 2 is not known; did you mean 'shape'?",
        "variable EXPERTSTREAM_FILLER_THREADS: 'many' is not a whole number",
        "option --count: 'x' is not a whole number",
    ]


def test_what_has_no_default_and_is_given_nowhere_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.touch()
    with pytest.raises(ConfigError) as error:
        load_settings(StreamSettings, file=file, environ={}, overrides={"backend": None})
    assert str(error.value) == (
        "backend is not set; give it as the option --backend or the variable EXPERTSTREAM_BACKEND "
        f"or as 'backend' in {file}"
    )


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # who opened it would wait for somebody who writes
    (tmp_path / "long.toml").touch()
    os.truncate(tmp_path / "long.toml", 1024**2 + 1)
    for file, reason in (
        (tmp_path / "gone.toml", "No such file"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "a\0b", "null"),
        (tmp_path, "it is a folder, not an ordinary file"),
        (tmp_path / "pipe", "it is a pipe"),
        (Path("/dev/zero"), "it is a character device"),
        (tmp_path / "long.toml", "it is longer than 1048576 bytes"),
    ):
        with pytest.raises(ConfigError, match=reason) as error:
            load_settings(StreamSettings, file=file, environ={}, overrides={})
        assert str(file) in str(error.value)


def test_a_file_that_is_not_toml_is_refused_with_the_position(tmp_path: Path) -> None:
    assert "line 2, column 9" in refusal(tmp_path, "count = 1\nratio = ?\n")
    assert "line 2" in refusal(tmp_path, "count = 1\ncount = 2\n")
    assert "DIR/settings.toml is not TOML" in refusal(tmp_path, f"count = {'9' * 5000}")


def test_a_file_that_is_not_utf8_is_refused_with_the_position(tmp_path: Path) -> None:
    file = tmp_path / "latin.toml"
    file.write_bytes('policy = "hei\xdf"'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"is not UTF-8: .* at byte 13") as error:
        load_settings(StreamSettings, file=file, environ={}, overrides={})
    assert str(file) in str(error.value)


@frozen(kw_only=True)
class Ordered:
    low: int
    high: int

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")


def test_values_that_do_not_go_together_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="do not go together: low 3 is above high 2"):
        load_settings(Ordered, file=None, environ={"EXPERTSTREAM_LOW": "3"}, overrides={"high": 2})


@pytest.mark.parametrize("wrong", [{"filler_threads": 0}, {"io_mode": "fast"}, {"backend": ""}, {"read_timeout_s": 0}])
def test_settings_made_by_hand_are_checked_too(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"'{next(iter(wrong))}'"):
        StreamSettings(**{"backend": "b", **wrong})  # type: ignore[arg-type]  # wrong on purpose
