"""What a user can set, and where a value came from when it is wrong.

Three places, the later one wins: a TOML file, EXPERTSTREAM_* variables, the options of a command line. A value
is checked in every place where it is given, also where a later one replaces it. Options of a backend are kept as
they were given until that backend is opened, because only it knows their types.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from reprlib import Repr
from typing import Any, Literal, TypeVar, get_args, get_origin

import attrs
from attrs import field, frozen, validators
from cattrs import Converter

from expertstream.errors import ConfigError
from expertstream.small_files import read_small_file
from expertstream.units import MemoryRequest

IoMode = Literal["auto", "direct", "buffered"]

HostTiering = Literal["inclusive", "exclusive"]
"""What a host tier keeps: what is read from the file, also while a slot has it; or what leaves a slot."""

ENVIRONMENT_PREFIX = "EXPERTSTREAM_"

_MOST_FILE_BYTES = 1024**2
"""What is longer is no file of settings."""

BackendNames = str | tuple[str, ...]
"""One backend, or several to be tried in turn. As a text of a setting, separated by commas."""


@frozen
class BackendOption:
    """One option of one backend as it was given: `value` is TOML's or the caller's, or text from the other places.

    `source` says for people where it was written.
    """

    backend: str
    key: str
    value: object
    place: Literal["code", "file", "variable", "option"] = "code"
    source: str = "an option in the call"

    def is_for(self, backend: str) -> bool:
        """Whether it was given for the backend of that name. A variable's name has only letters, digits and _."""
        return self.backend == (re.sub(r"\W", "_", backend).lower() if self.place == "variable" else backend)


def _backend_names(value: object, _: object = None) -> BackendNames:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _refusal(value, "a backend's name or a list of names")
    names = tuple(name.strip() for name in names)
    if not names or "" in names:
        raise _refusal(value, "a backend's name or a list of names: one of them is empty")
    if len(set(names)) < len(names):
        raise _refusal(value, "a list of different backends")
    return names[0] if len(names) == 1 else names


def _are_backend_names(instance: object, attribute: attrs.Attribute[BackendNames], value: BackendNames) -> None:
    try:
        _backend_names(value)
    except ValueError as error:
        raise ValueError(f"{attribute.name!r}: {error}") from None


def whole_number(least: int, most: int | None = None) -> Callable[[object, attrs.Attribute[int], int], None]:
    """A validator of attrs that refuses numbers below `least` or above `most`, in words for who set them."""

    def check(_: object, attribute: attrs.Attribute[int], value: int) -> None:
        if value < least or (most is not None and value > most):
            wanted = f"{least} up" if most is None else f"{least} to {most}"
            raise ValueError(f"{attribute.name!r} {value} is not a whole number from {wanted}")

    return check


@frozen(kw_only=True)
class StreamSettings:
    """What the core can be told. An engine adds its own by subclassing.

    `expert_memory` None leaves the amount to the planner, `host_memory` None too; it is what a host tier takes below
    slots that are not host memory. `host_tier` None is the default kind, where there is a host tier.
    `half_life_tokens` None leaves the half-life to the policy.
    `backends` are the options of backends, in the order given: [backends.NAME] in a file,
    EXPERTSTREAM_BACKENDS__NAME__KEY, --backend-option NAME.KEY=VALUE.
    """

    backend: BackendNames = field(validator=_are_backend_names)
    backends: tuple[BackendOption, ...] = ()
    expert_memory: MemoryRequest | None = None
    host_memory: MemoryRequest | None = None
    host_tier: HostTiering | None = field(
        default=None, validator=validators.optional(validators.in_(get_args(HostTiering)))
    )
    policy: str = field(default="hotness", validator=validators.min_len(1))
    io_mode: IoMode = field(default="auto", validator=validators.in_(get_args(IoMode)))
    filler_threads: int = field(default=8, validator=whole_number(1, 64))
    half_life_tokens: int | None = field(default=None, validator=validators.optional(whole_number(1, 10**9)))
    read_timeout_s: int = field(default=120, validator=whole_number(1, 86400))


Settings = TypeVar("Settings", bound=attrs.AttrsInstance)


def load_settings(
    cls: type[Settings],
    *,
    file: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, object],
    options_only: Collection[str] = (),
) -> Settings:
    """An instance of the attrs class `cls` from its defaults, `file`, `environ` and `overrides`, the later one winning.

    An override that is None was not given. Field types: str, int, float, bool, Path, Enum, Literal, MemoryRequest,
    tuple[X, ...] of these (in a variable: separated by commas), and X | None. Field validators must not look at
    other fields. `options_only` are names of a command line's options that are easily taken for settings.
    Raises one ConfigError that lists everything wrong, each with the place where it was written.
    """
    fields = {attribute.name: attribute for attribute in attrs.fields(cls)}
    given = [*_from_file(file), *_from_environment(environ, fields), *_from_overrides(overrides)]
    options = tuple(value for _, _, value, _ in given if isinstance(value, BackendOption))
    if options:
        given = [entry for entry in given if not isinstance(entry[2], BackendOption)]
        given.append(("backends", options[0].source, options, _typed))
    return _made(cls, given, lambda name: _where_to_set(name, file), "the settings", options_only)


def make_options(cls: type[Settings], backend: str, given: Iterable[BackendOption]) -> Settings:
    """The options of `backend` as an instance of its attrs class, from those of `given` that are for it.

    Types, order and errors are those of `load_settings`.
    """
    entries = [
        (option.key, option.source, option.value, _typed if option.place in ("code", "file") else _text)
        for option in given
        if option.is_for(backend)
    ]

    def where_to_set(key: str) -> str:
        return f"give it as {key!r} in the table [backends.{backend}] or as --backend-option {backend}.{key}=VALUE"

    return _made(cls, entries, where_to_set, f"the options of backend {backend!r}")


def _made(
    cls: type[Settings],
    given: Sequence[_Given],
    where_to_set: Callable[[str], str],
    all_of_them: str,
    options_only: Collection[str] = (),
) -> Settings:
    """An instance of `cls` from what was given, the later one winning, or one error that lists everything wrong."""
    attrs.resolve_types(cls)
    fields = {attribute.name: attribute for attribute in attrs.fields(cls)}
    problems: list[str] = []
    values: dict[str, object] = {}
    for name, source, value, converter in given:
        if name not in fields:
            problems.append(f"{source} {_unknown(name, fields, options_only)}")
            continue
        try:
            values[name] = converter.structure(value, fields[name].type)
            _validate(fields[name], values[name])
        except (ValueError, ConfigError) as error:
            problems.append(f"{source}: {_reason(error, name, source)}")
    for name, attribute in fields.items():
        if attribute.default is attrs.NOTHING and name not in {name for name, *_ in given}:
            problems.append(f"{name} is not set; {where_to_set(name)}")
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{all_of_them} do not go together: {_reason(error)}") from error


_Given = tuple[str, str, object, Converter]
"""The field's name, where the value was written, the value, and what converts it."""


def _from_file(file: Path | None) -> Iterator[_Given]:
    if file is None:
        return
    try:
        text = read_small_file(file, _MOST_FILE_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"configuration file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {file} is not UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:  # no ordinary file, too long, or a NUL in the name
        raise ConfigError(f"configuration file {file} cannot be read: {error}") from error
    try:
        table = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or what int() says of too many digits
        raise ConfigError(f"configuration file {file} is not TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"configuration file {file} nests tables or lists too deeply to be read") from None
    for key, value in table.items():
        if key == "backends" and isinstance(value, dict):
            yield from _from_tables(value, file, text)
        else:
            yield key, f"{key!r} in {file}{_line_of(key, text)}", value, _typed


def _from_tables(tables: Mapping[str, object], file: Path, text: str) -> Iterator[_Given]:
    for backend, table in tables.items():
        if isinstance(table, dict):
            for key, value in table.items():
                source = f"'backends.{backend}.{key}' in {file}{_line_of_option(backend, key, text)}"
                yield "backends", source, BackendOption(backend, key, value, "file", source), _typed
        else:
            yield "backends", f"'backends.{backend}' in {file}{_line_of('backends', text)}", table, _typed


def _line_of(key: str, text: str) -> str:
    """Where a key of the top level stands, as far as a look at the text's lines can tell."""
    begins_with_key = re.compile(rf"\s*[\[\"']*{re.escape(key)}[\"']?\s*[\].=]")
    found = next((number for number, line in enumerate(text.splitlines(), 1) if begins_with_key.match(line)), None)
    return f", line {found}" if found else ""


def _line_of_option(backend: str, key: str, text: str) -> str:
    """Where an option stands in the table [backends.NAME], or else where such tables begin."""
    backend_, key_ = (rf"[\"']?{re.escape(name)}[\"']?" for name in (backend, key))
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("["):
            inside = bool(re.match(rf"\s*\[\s*backends\s*\.\s*{backend_}\s*\]", line))
        elif inside and re.match(rf"\s*{key_}\s*[.=]", line):
            return f", line {number}"
    return _line_of("backends", text)


def _from_environment(environ: Mapping[str, str], fields: Mapping[str, object]) -> Iterator[_Given]:
    variables = {ENVIRONMENT_PREFIX + name.upper(): name for name in fields}
    for variable, text in environ.items():
        source = f"variable {variable}"
        if variable.startswith(f"{ENVIRONMENT_PREFIX}BACKENDS__"):
            _, backend, key = [*variable.lower().split("__", 2), ""][:3]
            option = BackendOption(backend, key, text, "variable", source)
            yield "backends", source, option if backend and key else text, _text
        elif variable.startswith(ENVIRONMENT_PREFIX):
            yield variables.get(variable, variable), source, text, _text


def _from_overrides(overrides: Mapping[str, object]) -> Iterator[_Given]:
    for name, value in overrides.items():
        if name == "backends" and isinstance(value, list):
            yield from map(_from_backend_option, value)
        elif value is not None:
            yield name, f"option --{name.replace('_', '-')}", value, _typed


def _from_backend_option(text: str) -> _Given:
    """`text` is NAME.KEY=VALUE, where a name may hold dots."""
    written, equals, value = text.partition("=")
    backend, _, key = written.rpartition(".")
    source = f"option --backend-option {written}"
    whole = BackendOption(backend, key, value, "option", source) if backend and key and equals else text
    return "backends", source, whole, _typed


def _validate(attribute: attrs.Attribute[Any], value: object) -> None:
    if attribute.validator is not None:
        attribute.validator(None, attribute, value)


def _reason(error: Exception, name: str = "", source: str = "") -> str:
    """The message alone: some validators of attrs add the attribute, the choices and the value as arguments.

    They begin with the attribute's name, which is left out where `source` says it.
    """
    message = str(error.args[0]) if error.args else type(error).__name__
    return message.removeprefix(f"{name!r} ") if name in source.lower().replace("-", "_") else message


def _unknown(name: str, fields: Mapping[str, object], options_only: Collection[str]) -> str:
    """What is wrong with a name, and which was meant, written as it was: as a variable or as a key."""
    is_variable = name.startswith(ENVIRONMENT_PREFIX)
    plain = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("-", "_")
    if plain in options_only:
        return f"is no setting; {plain} can only be given as an option of the command line"
    spelled = {field: f"{ENVIRONMENT_PREFIX}{field.upper()}" if is_variable else repr(field) for field in fields}
    close = get_close_matches(plain, fields, n=1)
    return (
        f"is not known; did you mean {spelled[close[0]]}?"
        if close
        else f"is not known; known are {', '.join(sorted(spelled.values() if is_variable else fields))}"
    )


def _where_to_set(name: str, file: Path | None) -> str:
    places = [f"the option --{name.replace('_', '-')}", f"the variable {ENVIRONMENT_PREFIX}{name.upper()}"]
    return "give it as " + " or ".join(places) + (f" or as {name!r} in {file}" if file else "")


def _refusal(value: object, wanted: str) -> ValueError:
    return ValueError(f"{_SHORT.repr(value)} is not {wanted}")


_SHORT = Repr()
"""Shows no value deeper than a few levels: dotted keys of TOML can nest further than `repr` can follow."""
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 500


def _exactly(wanted_type: type, wanted: str) -> Any:
    def structure(value: object, _: object) -> object:
        if type(value) is not wanted_type:
            raise _refusal(value, wanted)
        return value

    return structure


def _number(value: object, _: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
    raise _refusal(value, "a finite number")


def _path(value: object, _: object) -> Path:
    if not isinstance(value, str | Path) or value == "":
        raise _refusal(value, "a path")
    return Path(value)


def _memory_request(value: object, _: object) -> MemoryRequest:
    if isinstance(value, MemoryRequest):
        return value
    if type(value) is int and value >= 0:
        return MemoryRequest(size_bytes=value)
    if not isinstance(value, str):
        raise _refusal(value, 'an amount of memory, such as 8589934592, "8GiB", "25%" or "all"')
    return MemoryRequest.parse(value)


def _backend_options(value: object, _: object) -> tuple[BackendOption, ...]:
    if isinstance(value, tuple) and all(isinstance(option, BackendOption) for option in value):
        return value
    raise _refusal(
        value,
        "a backend's option: write it in a table [backends.NAME] of a file,"
        f" as {ENVIRONMENT_PREFIX}BACKENDS__NAME__KEY=VALUE or as --backend-option NAME.KEY=VALUE",
    )


def _literal(value: object, wanted: Any) -> object:
    choices = get_args(wanted)
    if value not in choices:
        raise _refusal(value, f"one of {', '.join(map(repr, choices))}")
    return value


def _enumeration(value: object, wanted: Any) -> object:
    try:
        return wanted(value)
    except ValueError:
        raise _refusal(value, f"one of {', '.join(repr(member.value) for member in wanted)}") from None


def _integer_text(value: str, _: object) -> int:
    if re.fullmatch(r"[+-]?[0-9]{1,100}", value):
        return int(value)
    raise _refusal(value, "a whole number")


def _number_text(value: str, _: object) -> float:
    try:
        number = float(value)
    except ValueError:
        raise _refusal(value, "a number") from None
    return _number(number, None)


def _boolean_text(value: str, _: object) -> bool:
    if value not in ("true", "false"):
        raise _refusal(value, "true or false")
    return value == "true"


def _converter(items: Callable[[Any], Sequence[object]]) -> Converter:
    """A converter that looks at a value strictly; `items` splits what is given for a tuple."""

    def structure_tuple(value: object, wanted: Any) -> tuple[object, ...]:
        member = get_args(wanted)[0]
        return tuple(converter.structure(item, member) for item in items(value))

    converter = Converter(detailed_validation=False)
    converter.register_structure_hook(str, _exactly(str, "a text"))
    converter.register_structure_hook(Path, _path)
    converter.register_structure_hook(MemoryRequest, _memory_request)
    converter.register_structure_hook_func(_is_of_kind(Literal), _literal)
    converter.register_structure_hook_func(_is_of_kind(tuple), structure_tuple)
    converter.register_structure_hook_func(_is_enumeration, _enumeration)
    converter.register_structure_hook_func(lambda wanted: wanted == BackendNames, _backend_names)
    converter.register_structure_hook_func(lambda wanted: wanted == tuple[BackendOption, ...], _backend_options)
    return converter


def _is_of_kind(kind: object) -> Callable[[Any], bool]:
    return lambda wanted: get_origin(wanted) is kind


def _is_enumeration(wanted: Any) -> bool:
    return isinstance(wanted, type) and issubclass(wanted, Enum)


def _items(value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise _refusal(value, "a list")
    return value


def _items_text(value: str) -> list[str]:
    return [item.strip() for item in value.split(",")] if value.strip() else []


_typed = _converter(_items)
"""Converts values that have a type already: TOML's and a command line's."""
_typed.register_structure_hook(int, _exactly(int, "a whole number"))
_typed.register_structure_hook(float, _number)
_typed.register_structure_hook(bool, _exactly(bool, "true or false"))

_text = _converter(_items_text)
"""Converts the text of a variable."""
_text.register_structure_hook(int, _integer_text)
_text.register_structure_hook(float, _number_text)
_text.register_structure_hook(bool, _boolean_text)
