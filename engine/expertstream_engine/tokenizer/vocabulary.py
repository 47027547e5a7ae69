"""The vocabulary that a checkpoint's metadata describe: token texts, their types, and the ids with a meaning.

It reads and checks; turning text into tokens is its neighbours'. Source of the keys: the GGUF specification (gguf.md
of the ggml project); of what holds where a key is absent: llama.cpp (llama-vocab.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from expertstream.errors import CheckpointError, UnsupportedCheckpoint
from expertstream_engine.tokenizer.metadata import numbers_at, shown, texts_at, whole_number_at


class UnsupportedTokenizer(UnsupportedCheckpoint):
    """The checkpoint's text cannot be tokenized by this version; its token ids can still be run."""


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`. Tokens that are UNDEFINED or UNUSED decode to nothing."""

    UNDEFINED = 0
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

    Raises UnsupportedTokenizer without a token list, CheckpointError if the metadata are damaged or contradict
    themselves.
    """
    texts = texts_at(metadata, "tokenizer.ggml.tokens")
    if not texts:
        raise UnsupportedTokenizer("the file has no tokenizer.ggml.tokens: run it on token ids instead of text")
    types = _types(metadata, len(texts))
    _refuse_duplicates(texts)
    _refuse_bytes_without_value(texts, types)
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
    listed = numbers_at(metadata, "tokenizer.ggml.token_type", "whole numbers", token_count)
    if listed is None:
        return np.full(token_count, TokenType.NORMAL, np.uint8)
    if (unknown := np.flatnonzero((listed < min(TokenType)) | (listed > max(TokenType)))).size:
        raise CheckpointError(
            f"tokenizer.ggml.token_type has {listed[unknown[0]]} for the id {unknown[0]};"
            f" there are the types {min(TokenType):d} to {max(TokenType):d}"
        )
    return listed.astype(np.uint8)


def _token_id(metadata: Mapping[str, object], role: str, default: int | None, token_count: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    token = whole_number_at(metadata, key)
    if token is None:
        return default if default is not None and default < token_count else None
    if not 0 <= token < token_count:
        raise CheckpointError(f"{key} is {token}, and the vocabulary has the ids 0 to {token_count - 1}")
    return token


def _refuse_duplicates(texts: Sequence[str]) -> None:
    if len(set(texts)) == len(texts):
        return
    seen: dict[str, int] = {}
    for token, text in enumerate(texts):
        if text and (first := seen.setdefault(text, token)) != token:
            raise CheckpointError(f"tokenizer.ggml.tokens has {shown(text)} twice, with the ids {first} and {token}")


def _refuse_bytes_without_value(texts: Sequence[str], types: NDArray[np.uint8]) -> None:
    for token in np.flatnonzero(types == TokenType.BYTE).tolist():
        if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", texts[token]):
            raise CheckpointError(
                f"tokenizer.ggml.tokens has {shown(texts[token])} with the id {token}, by its type a byte;"
                " such a token is spelled <0x00> to <0xFF>"
            )
