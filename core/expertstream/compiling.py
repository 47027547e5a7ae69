"""Compile functions with numba so that its cache on disk notices a change of any source that they are made of.

Numba stamps a cached function with the file that defines it, and not with those of the compiled functions that
it calls. Here the function's name carries a digest of them all, and numba names its cache files by that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

from expertstream.code_cache import cached_cfunc, cached_njit, warn_of_no_cache

F = TypeVar("F", bound=Callable[..., Any])


class Compiler:
    """numba's `njit` and `cfunc`. `sources` are the caller's file and all files whose compiled functions it uses.

    What is to be cached where nothing can be written is compiled in each process anew, and so is what was written and
    is damaged; a warning says so once.
    """

    def __init__(self, *sources: str) -> None:
        # Now, not when a function is compiled: a file may change while a process runs what it was.
        digest = hashlib.sha256()
        for source in sources:
            digest.update(Path(source).read_bytes())
        self._digest = digest.hexdigest()[:16]

    def njit(self, *, cache: bool = False, **options: Any) -> Callable[[F], F]:
        """As `numba.njit` with these options."""

        def plain(function: Any) -> Any:
            return numba.njit(**options)(function)

        def cached(function: Any) -> Any:
            return cached_njit(function, options)

        return self._cached(cached, plain) if cache else plain

    def cfunc(self, signature: Any, *, cache: bool = False, **options: Any) -> Callable[[Callable[..., None]], Any]:
        """As `numba.cfunc` with these options."""

        def plain(function: Any) -> Any:
            return numba.cfunc(signature, **options)(function)

        def cached(function: Any) -> Any:
            return cached_cfunc(signature, function, options)

        return self._cached(cached, plain) if cache else plain

    def _cached(self, cached: Callable[[Any], Any], plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            function.__qualname__ = f"{function.__qualname__}_{self._digest}"
            try:
                return cached(function)
            except RuntimeError as error:
                if "cannot cache function" not in str(error):
                    raise
                warn_of_no_cache()
                return plain(function)

        return decorate
