"""What a checkpoint's metadata hold at a key that a tokenizer reads, checked for its type before it is used.

It knows types and not meanings, and it is strict: the text "false" is no boolean, and a boolean is no number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from expertstream.errors import CheckpointError

T = TypeVar("T", str, int, bool)


def text_at(metadata: Mapping[str, object], key: str) -> str | None:
    """The text at `key`, None where the key is absent. Raises CheckpointError for another type, as all here do."""
    return _scalar_at(metadata, key, str, "a text")


def bool_at(metadata: Mapping[str, object], key: str) -> bool | None:
    """The boolean at `key`, None where the key is absent."""
    return _scalar_at(metadata, key, bool, "true or false")


def whole_number_at(metadata: Mapping[str, object], key: str) -> int | None:
    """The whole number at `key`, None where the key is absent."""
    return _scalar_at(metadata, key, int, "a whole number")


def texts_at(metadata: Mapping[str, object], key: str) -> Sequence[str]:
    """The texts at `key`, empty where the key is absent."""
    value = metadata.get(key, ())
    if not isinstance(value, list | tuple):
        raise _refusal(key, value, "a list of texts")
    for place, text in enumerate(value):
        if type(text) is not str:
            raise _refusal(f"{key}[{place}]", text, "a text")
    return value


def numbers_at(
    metadata: Mapping[str, object], key: str, wanted: Literal["whole numbers", "numbers"], count: int
) -> NDArray[Any] | None:
    """The `count` numbers at `key`, None where the key is absent. `count` is that of the tokens."""
    if (value := metadata.get(key)) is None:
        return None
    try:
        numbers = np.asarray(value)
    except ValueError:  # a list of lists of different lengths
        raise _refusal(key, value, f"a list of {wanted}") from None
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in _KINDS[wanted]):
        raise _refusal(key, value, f"a list of {wanted}")
    if numbers.size != count:
        raise CheckpointError(f"{key} has the length {numbers.size}, tokenizer.ggml.tokens {count}")
    return numbers


def shown(value: object) -> str:
    """A value for a message, cut short where it is long."""
    return _SHORT.repr(value)


_KINDS = {"whole numbers": "iu", "numbers": "iuf"}
"""The kinds of numpy's types."""

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def _scalar_at(metadata: Mapping[str, object], key: str, wanted_type: type[T], wanted: str) -> T | None:
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not wanted_type:
        raise _refusal(key, value, wanted)
    return value


def _refusal(place: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(f"{place} is {shown(value)}, and should be {wanted}; the tokenizer in the file is damaged")
