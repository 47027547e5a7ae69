"""The vocabulary that a checkpoint's metadata describe: token texts, their types, and the ids with a meaning.

It reads and checks; turning text into tokens is its neighbours'. Source of the keys: the GGUF specification (gguf.md
of the ggml project); of what holds where a key is absent: llama.cpp (llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import cast

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from expertstream.errors import CheckpointError, UnsupportedCheckpoint


class UnsupportedTokenizer(UnsupportedCheckpoint):
    """The checkpoint's text cannot be tokenized by this version; its token ids can still be run."""


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@frozen(eq=False)
class Vocabulary:
    """Every token of a checkpoint by its id: `texts` as the file spells them, and `types` (uint8, TokenType).

    `unknown_id` stands for text that nothing else does; 0 where the file names none.
    """

    texts: Sequence[str] = field(repr=False)
    types: NDArray[np.uint8] = field(repr=False)
    bos_id: int | None
    eos_ids: frozenset[int]
    unknown_id: int

    def ids_of(self, *types: TokenType) -> dict[str, int]:
        """The tokens of these types, id by text; an empty text names no token and is left out."""
        chosen = np.flatnonzero(np.isin(self.types, types)).tolist()
        return {self.texts[token]: token for token in chosen if self.texts[token]}


def read_vocabulary(
    metadata: Mapping[str, object],
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
) -> Vocabulary:
    """The vocabulary in a GGUF's metadata; the arguments are the ids that hold where the file names none.

    Raises UnsupportedTokenizer without a token list, CheckpointError if the metadata contradict themselves.
    """
    texts = string_list(metadata, "tokenizer.ggml.tokens")
    if not texts:
        raise UnsupportedTokenizer("the file has no tokenizer.ggml.tokens: run it on token ids instead of text")
    types = _types(metadata, len(texts))
    _refuse_duplicates(texts)
    ends = {
        _token_id(metadata, "eos", eos_id, len(texts)),
        _token_id(metadata, "eot", None, len(texts)),
        _token_id(metadata, "eom", None, len(texts)),
    }
    control_texts = {texts[token]: token for token in np.flatnonzero(types == TokenType.CONTROL).tolist()}
    return Vocabulary(
        texts=texts,
        types=types,
        bos_id=_token_id(metadata, "bos", bos_id, len(texts)),
        eos_ids=frozenset(token for token in ends if token is not None) | _ends_by_text(control_texts),
        unknown_id=_token_id(metadata, "unknown", None, len(texts)) or 0,
    )


def string_list(metadata: Mapping[str, object], key: str) -> Sequence[str]:
    """The strings at `key`, empty where the key is absent."""
    return cast("Sequence[str]", metadata.get(key, ()))


_END_TEXTS = frozenset(
    {
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<EOT>",
        "[EOS]",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
    }
)
"""Control tokens that end a turn of models whose files often name only one of them as EOS."""


def _ends_by_text(control_texts: Mapping[str, int]) -> frozenset[int]:
    ends = {text: token for text, token in control_texts.items() if text in _END_TEXTS}
    if "<|return|>" in ends and "<|call|>" in ends:
        # The harmony format: <|end|> closes a message there, and the turn goes on.
        ends.pop("<|end|>", None)
    return frozenset(ends.values())


def _types(metadata: Mapping[str, object], token_count: int) -> NDArray[np.uint8]:
    listed = metadata.get("tokenizer.ggml.token_type")
    if listed is None:
        return np.full(token_count, TokenType.NORMAL, np.uint8)
    types = np.asarray(listed).astype(np.uint8)
    if types.shape != (token_count,):
        raise CheckpointError(f"tokenizer.ggml.token_type has shape {types.shape}, tokenizer.ggml.tokens {token_count}")
    return types


def _token_id(metadata: Mapping[str, object], role: str, default: int | None, token_count: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in metadata:
        return default if default is not None and default < token_count else None
    token = int(cast("int", metadata[key]))
    if not 0 <= token < token_count:
        raise CheckpointError(f"{key} is {token}, and the vocabulary has the ids 0 to {token_count - 1}")
    return token


def _refuse_duplicates(texts: Sequence[str]) -> None:
    if len(set(texts)) == len(texts):
        return
    seen: dict[str, int] = {}
    for token, text in enumerate(texts):
        if text and (first := seen.setdefault(text, token)) != token:
            raise CheckpointError(f"tokenizer.ggml.tokens has {text!r} twice, with the ids {first} and {token}")
