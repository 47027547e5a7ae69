"""Compile functions with numba so that its cache on disk notices a change of any source that they are made of.

Numba stamps a cached function with the file that defines it, and not with those of the compiled functions that
it calls. Here the function's name carries a digest of them all, and numba names its cache files by that.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

from expertstream.log import get_log

F = TypeVar("F", bound=Callable[..., Any])


class Compiler:
    """numba's `njit` and `cfunc`. `sources` are the caller's file and all files whose compiled functions it uses.

    What is to be cached where nothing can be written is compiled in each process anew, and a warning says so once.
    """

    def __init__(self, *sources: str) -> None:
        # Now, not when a function is compiled: a file may change while a process runs what it was.
        digest = hashlib.sha256()
        for source in sources:
            digest.update(Path(source).read_bytes())
        self._digest = digest.hexdigest()[:16]

    def njit(self, *, cache: bool = False, **options: Any) -> Callable[[F], F]:
        """As `numba.njit` with these options."""
        return lambda function: self._compiled(numba.njit, function, cache=cache, **options)

    def cfunc(self, signature: Any, *, cache: bool = False, **options: Any) -> Callable[[Callable[..., None]], Any]:
        """As `numba.cfunc` with these options."""

        def decorate(*, cache: bool, **options: Any) -> Any:
            return numba.cfunc(signature, cache=cache, **options)

        return lambda function: self._compiled(decorate, function, cache=cache, **options)

    def _compiled(self, decorate: Callable[..., Any], function: Any, *, cache: bool, **options: Any) -> Any:
        if not cache:
            return decorate(cache=False, **options)(function)
        function.__qualname__ = f"{function.__qualname__}_{self._digest}"
        try:
            return decorate(cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache function" not in str(error):
                raise
            _warn_of_no_cache()
            return decorate(cache=False, **options)(function)


@functools.cache
def _warn_of_no_cache() -> None:
    get_log().warning("compiled_code_not_cached", remedy="set NUMBA_CACHE_DIR to a folder that can be written")
