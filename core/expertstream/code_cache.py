"""numba's cache on disk, made so that nothing found there, and nothing that cannot be kept there, ends a run.

numba links whatever it finds in its cache, and lets every error of reading or writing it through. Here an entry that
is not what was written is compiled anew and replaced, and what cannot be saved is used without; either is said once.

Only this module reaches into numba. Where a version of it is made otherwise, its own cache stays, entries unchecked.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import os
import pickle
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numba

from expertstream.log import get_log

REMEDY = "set NUMBA_CACHE_DIR to a folder that can be written and has space left"


def cached_njit(function: Any, options: Mapping[str, Any]) -> Any:
    """As `numba.njit(cache=True, **options)(function)`, whose RuntimeError says that there is no folder to cache in."""
    compiled = numba.njit(cache=True, **options)(function)
    if hasattr(compiled, "_cache"):  # not where numba is told to compile nothing
        compiled._cache = CheckedCache(compiled._cache)
    return compiled


def cached_cfunc(signature: Any, function: Any, options: Mapping[str, Any]) -> Any:
    """As `numba.cfunc(signature, cache=True, **options)(function)`, and with its errors."""
    try:
        # Not numba.cfunc, which compiles before anything could be put between it and its cache.
        normalized = importlib.import_module("numba.core.sigutils").normalize_signature(signature)
        make = importlib.import_module("numba.core.ccallback").CFunc
        compiled = make(function, normalized, locals={}, options=dict(options))
        compiled.enable_caching()
        compiled._cache = CheckedCache(compiled._cache)
    except (ImportError, AttributeError, TypeError):
        return numba.cfunc(signature, cache=True, **options)(function)
    compiled.compile()
    return compiled


class CheckedCache:
    """Stands before numba's cache of one function. numba calls it under its compiler lock, one thread at a time."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        try:
            folder, stamp = Path(cache.cache_path), cache._impl.locator.get_source_stamp()
            cache._cache_file = _Entries(folder, cache._impl.filename_base, stamp, cache._cache_file._dump)
        except AttributeError:
            pass  # another numba, whose entries stay unchecked; an error of its cache ends no run still

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, context: Any) -> Any:
        """What was compiled for this signature, or None, upon which numba compiles it."""
        try:
            return self._cache.load_overload(signature, context)
        except Exception as error:  # noqa: BLE001 - it can be compiled anew
            _warn_of_no_load(self._cache.cache_path, error)
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep what was compiled for later processes, if that can be done."""
        try:
            self._cache.save_overload(signature, compiled)
        except Exception as error:  # noqa: BLE001 - it can be used without
            warn_of_no_cache(folder=str(self._cache.cache_path), reason=_described(error))


class _Entries:
    """The files of one function, one for each signature and CPU, in place of numba's `IndexDataCacheFile`.

    A file is a SHA-256 digest and what it is of: the pickled file name, numba's version with the stamp of the source,
    and the pickled key and code. Nothing is unpickled, let alone linked, before the digest is found right.
    """

    def __init__(self, folder: Path, base: str, source_stamp: Any, dump: Any) -> None:
        self._folder = folder
        self._base = base
        self._made_from = (numba.__version__, source_stamp)
        self._dump = dump

    def load(self, key: Any) -> Any:
        path = self._path(key)
        try:
            return self._read(path, key)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, it can be compiled anew
            _warn_of_no_load(path, error)
            return None

    def save(self, key: Any, data: Any) -> None:
        path = self._path(key)
        entry = pickle.dumps((path.name, self._made_from, self._dump((key, data))), protocol=pickle.HIGHEST_PROTOCOL)
        written = path.with_name(f"{path.name}.tmp.{uuid.uuid4().hex[:16]}")
        try:
            written.write_bytes(_digest(entry) + entry)
            os.replace(written, path)  # whole or not at all, whatever other processes do
        finally:
            written.unlink(missing_ok=True)

    def flush(self) -> None:
        for path in self._folder.glob(f"{glob.escape(self._base)}.*.nbc"):
            path.unlink(missing_ok=True)

    def _read(self, path: Path, key: Any) -> Any:
        content = path.read_bytes()
        digest, entry = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if _digest(entry) != digest:
            raise ValueError(f"its {len(content)} bytes are not those that were written")
        name, made_from, code = pickle.loads(entry)
        if name != path.name:
            raise ValueError(f"it was written as {name}")
        if made_from != self._made_from:
            return None  # by another numba, or from another source
        found, data = pickle.loads(code)
        return data if found == key else None

    def _path(self, key: Any) -> Path:
        return self._folder / f"{self._base}.{_digest(repr(key).encode()).hex()[:16]}.nbc"


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


_DIGEST_BYTES = 32

_said: set[str] = set()


def warn_of_no_cache(**details: str) -> None:
    """Say that compiled code is not kept for the next process; once in this one."""
    _warn_once("compiled_code_not_cached", **details, remedy=REMEDY)


def _warn_of_no_load(path: Path | str, error: Exception) -> None:
    effect = "it is compiled anew and replaced, and so is whatever else cannot be loaded"
    _warn_once("compiled_code_not_loaded", path=str(path), reason=_described(error), effect=effect)


def _warn_once(event: str, **details: str) -> None:
    if event not in _said:
        _said.add(event)
        get_log().warning(event, **details)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
