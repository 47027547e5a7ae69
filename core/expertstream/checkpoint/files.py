"""Find the files of a checkpoint: from one file, any shard of a set, or the folder that holds them.

It goes by names alone and opens nothing; whether the shards fit together is for their headers to say.
Source of the names: ggml's gguf-split, `<stem>-00001-of-00003.gguf`, counting from 1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from expertstream.errors import CheckpointError


def find_files(path: Path) -> tuple[Path, ...]:
    """The files of the checkpoint at `path`, shards in order; links are kept as they are.

    Raises CheckpointError when nothing is there, when shards are missing, or when a folder leaves a choice.
    """
    if os.path.isdir(path):
        path = _only_checkpoint_in(path)
    files: tuple[Path, ...] = (path,)
    if (shard := _shard_name(path)) is not None:
        stem, count, suffix = shard
        files = tuple(path.with_name(f"{stem}-{number:05}-of-{count:05}{suffix}") for number in range(1, count + 1))
    there = [number for number, file in enumerate(files, 1) if _exists(file)]
    if not there:
        raise CheckpointError(f"{path}: {_absence(path)}; give a GGUF file, any shard of a set, or a folder with one")
    if len(there) < len(files):
        missing = sorted(set(range(1, len(files) + 1)).difference(there))
        raise CheckpointError(
            f"{path}: {len(there)} of {len(files)} shards are there ({_ranges(there)}), missing: {_ranges(missing)}; "
            f"the download is incomplete, or the shards lie in several folders"
        )
    return files


_SHARD_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.IGNORECASE)


def _only_checkpoint_in(folder: Path) -> Path:
    """The one checkpoint of a folder, as any of its files. Hidden files do not count: some systems leave them."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"{folder}: the folder cannot be listed: {error.strerror}") from error
    found: dict[object, list[Path]] = {}
    for name in names:
        path = folder / name
        if name.lower().endswith(".gguf") and not os.path.isdir(path):
            found.setdefault(_shard_name(path) or name, []).append(path)
    if not found:
        held = f"it holds {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "it is empty"
        raise CheckpointError(f"{folder}: no GGUF file in this folder: {held}; give a folder with a GGUF file")
    if len(found) > 1:
        choices = "\n".join(f"  {files[0]}{_shards_there(files)}" for files in found.values())
        raise CheckpointError(f"{folder}: {len(found)} checkpoints in this folder; give one of them:\n{choices}")
    return next(iter(found.values()))[0]


def _shard_name(path: Path) -> tuple[str, int, str] | None:
    """Stem, shard count and suffix: what the names of a set's shards have in common. None for any other name."""
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return None
    return match[1], int(match[3]), match[4]


def _shards_there(files: Sequence[Path]) -> str:
    shard = _shard_name(files[0])
    return "" if shard is None else f" ({len(files)} of {shard[1]} shards)"


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be looked at: {error.strerror}") from error
    return True


def _absence(path: Path) -> str:
    return f"a link to {path.readlink()}, which does not exist" if path.is_symlink() else "does not exist"


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as people write them: "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
