"""Hotlists: which experts of a model were hot in earlier runs, in a file, so that the next run begins with them.

It owns the file's format and whether a list may be used with a model. It loads no expert: the streamer seeds.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from expertstream.checkpoint.index import Checkpoint
from expertstream.errors import ConfigError, MachineError
from expertstream.log import get_log
from expertstream.slots import ExpertKey
from expertstream.small_files import kind_of, read_small_file

NO_HOTLIST = Path("none")
"""What is named to have none, also where one lies beside the model; a file of that name needs its folder's."""

_FORMAT = "expertstream-hotlist"
_VERSION = 1
_SUFFIX = ".hotlist.json"

_MOST_BYTES = 64 * 1024**2
"""No hotlist is longer: an expert takes some 40 bytes at most, which makes it more than a million experts."""


@frozen(eq=False)
class Hotlist:
    """Experts of one model with their scores, hottest first.

    `identity` is the checkpoint's, `model_name` for people. `expert_counts` are the experts of each routed layer.
    A score is in selections, as the policy that gave it counts them; 0 from a policy that only orders.
    """

    identity: str
    model_name: str
    experts_per_token: int
    expert_counts: Mapping[int, int]
    scores: Mapping[ExpertKey, float]


def hotlist_of(checkpoint: Checkpoint, scores: Mapping[ExpertKey, float]) -> Hotlist:
    """The hotlist of a model from experts with their scores, hottest first."""
    return Hotlist(
        identity=checkpoint.identity,
        model_name=str(checkpoint.metadata.get("general.name", checkpoint.files[0].name)),
        experts_per_token=checkpoint.experts_per_token,
        expert_counts={layer.layer: layer.expert_count for layer in checkpoint.layers},
        scores=dict(scores),
    )


def hotlist_beside(checkpoint: Checkpoint) -> Path:
    """Where a hotlist is found by itself: beside the model's first file, its name with ".hotlist.json" after it."""
    first = checkpoint.files[0]
    return first.with_name(first.name + _SUFFIX)


def choose_hotlist(checkpoint: Checkpoint, named: Path | None) -> Hotlist | None:
    """The list that the user named, else the one beside the model, None if there is none or NO_HOTLIST was named.

    A list of another model is refused, unless the user named it and every expert of it exists here: then a warning is
    logged. Raises ConfigError for that, and for a file that cannot be read or is no hotlist.
    """
    if named == NO_HOTLIST:
        return None
    path = named if named is not None else hotlist_beside(checkpoint)
    if named is None and _is_nothing(path):
        return None
    hotlist = read_hotlist(path)
    of_another = (
        f"hotlist {path} is of another model: of {hotlist.model_name!r} ({hotlist.identity}),"
        f" and this one is {hotlist_of(checkpoint, {}).model_name!r} ({checkpoint.identity})"
    )
    is_of_another = hotlist.identity != checkpoint.identity
    if is_of_another and named is None:
        raise ConfigError(
            f"{of_another}; remove it, leave it out (--hotlist {NO_HOTLIST}), or use it nevertheless by naming it:"
            f" --hotlist {path}"
        )
    expert_counts = {layer.layer: layer.expert_count for layer in checkpoint.layers}
    if lacking := [key for key in hotlist.scores if key.expert >= expert_counts.get(key.layer, 0)]:
        raise ConfigError(
            f"{of_another if is_of_another else f'hotlist {path} is damaged'}; expert {lacking[0].expert} of layer"
            f" {lacking[0].layer} and {len(lacking) - 1} more of its {len(hotlist.scores)} experts do not exist here"
        )
    if is_of_another:
        get_log().warning(
            "hotlist_of_another_model",
            file=str(path),
            its_model=hotlist.model_name,
            its_identity=hotlist.identity,
            identity=checkpoint.identity,
        )
    return hotlist


def read_hotlist(path: Path) -> Hotlist:
    """The list in an ordinary file.

    Raises ConfigError where it cannot be read, is no hotlist, is longer than any or has a version not known here.
    """
    try:
        content = read_small_file(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"hotlist {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # also a NUL in the name
        raise ConfigError(f"hotlist {path} cannot be read: {error}") from error
    try:
        return _parsed(json.loads(content))
    except (ValueError, OverflowError, RecursionError) as error:  # also not UTF-8, numbers beyond floats, JSON too deep
        raise ConfigError(f"{path} is not a hotlist of version {_VERSION}: {error}") from error


def write_hotlist(path: Path, hotlist: Hotlist) -> None:
    """Write a list in place of the list that `path` holds, all of it or nothing.

    Raises ConfigError where `refuse_unwritable` does, MachineError where writing fails.
    """
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": {
            "identity": hotlist.identity,
            "name": hotlist.model_name,
            "experts_per_token": hotlist.experts_per_token,
            "expert_counts": {str(layer): count for layer, count in hotlist.expert_counts.items()},
        },
        "experts": [[key.layer, key.expert, score] for key, score in hotlist.scores.items()],
    }
    refuse_unwritable(path)
    target = Path(os.path.realpath(path))  # a link stays, and what it leads to is replaced
    unfinished = target.with_name(f".{secrets.token_hex(8)}{_SUFFIX}")  # however long the name of the target is
    try:
        try:
            with unfinished.open("x", encoding="utf-8") as file:
                json.dump(document, file, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())  # the name must not be there before the bytes are
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(f"hotlist {path} cannot be written: {error.strerror}") from error


def refuse_unwritable(path: Path) -> None:
    """Raise ConfigError where a hotlist could not be written at `path`, as far as that shows beforehand.

    A list takes the place of what is there, so that may only be another list, of any model, or an empty file.
    """
    refusal = f"a hotlist cannot be saved as {path}"
    try:
        status = _status(path)
    except OSError as error:
        raise ConfigError(f"{refusal}: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{refusal}: {error}") from error
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{refusal}: it is {kind_of(status.st_mode)}, not an ordinary file")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{refusal}: {folder} is no folder that can be written to")
    if status is not None and status.st_size:
        try:
            read_hotlist(path)
        except ConfigError as error:
            raise ConfigError(
                f"{refusal}: it holds something that cannot be read as a hotlist; name another file or remove it"
                f" ({error})"
            ) from error


def _status(path: Path) -> os.stat_result | None:
    """None where there is nothing at `path`. Raises OSError where that cannot be told, ValueError for a NUL in it."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_nothing(path: Path) -> bool:
    """Whether nothing is surely at `path`: what cannot be looked at may be there, if its name is not too long to be."""
    try:
        return _status(path) is None
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG


def _parsed(document: Any) -> Hotlist:
    """Raises ValueError for a document that is anything else than what `write_hotlist` makes."""
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(f"it does not say format {_FORMAT!r}")
    if document.get("version") != _VERSION or isinstance(document.get("version"), bool):
        raise ValueError(f"its version is {document.get('version')!r}")
    match document:
        case {
            "model": {
                "identity": str(identity),
                "name": str(name),
                "experts_per_token": int(experts_per_token),
                "expert_counts": dict(expert_counts),
            },
            "experts": list(experts),
        }:
            scores: dict[ExpertKey, float] = {}
            for entry in experts:
                key, score = _expert(entry)
                if key in scores:
                    raise ValueError(f"it names expert {key.expert} of layer {key.layer} twice")
                scores[key] = score
            counts = {int(layer): _count(count) for layer, count in expert_counts.items()}
            return Hotlist(identity, name, experts_per_token, counts, scores)
    raise ValueError("its model or its experts are missing, or are not what they should be")


def _count(count: object) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"{count!r} is not how many experts a layer has")
    return count


def _expert(entry: object) -> tuple[ExpertKey, float]:
    match entry:
        case [int(layer), int(expert), int(score) | float(score)] if not any(isinstance(part, bool) for part in entry):
            if layer >= 0 and expert >= 0 and 0 <= score < math.inf:
                return ExpertKey(layer, expert), float(score)
    raise ValueError(f"{entry!r} is not a layer, an expert and a score")
