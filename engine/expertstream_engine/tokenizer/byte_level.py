"""Byte-level BPE: text as bytes, each spelled as one printable character, merged by a ranked list of pairs.

It encodes plain text; special tokens in it are its caller's. Source of the spelling: GPT-2's bytes_to_unicode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import models, pre_tokenizers

from expertstream.errors import CheckpointError
from expertstream.log import get_log
from expertstream_engine.tokenizer.metadata import shown, text_at, texts_at
from expertstream_engine.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from expertstream_engine.tokenizer.vocabulary import TokenType, UnsupportedTokenizer, Vocabulary


class ByteLevelBpe:
    """Encodes with `tokenizers`; safe from any thread."""

    prefixes_space = False

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre_tokenizer: PreTokenizer) -> None:
        # Control tokens stay out: no text may spell one by merging.
        ids = vocabulary.ids_of(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        absent = sorted(byte for char, byte in _BYTE_OF_CHAR.items() if char not in ids)
        if absent:
            get_log().warning("tokenizer_lacks_bytes", absent_bytes=absent, effect="they are dropped from prompts")
        self.drops_text = bool(absent)
        self._tokenizer = tokenizers.Tokenizer(
            models.BPE(ids, _pairs(merges, ids), ignore_merges=pre_tokenizer.whole_words_first)
        )
        cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]
        spell_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell_bytes])

    def encode(self, text: str) -> list[int]:
        """The ids of plain text. Raises UnicodeEncodeError for lone surrogates, which have no UTF-8."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def bytes_of(self, token_text: str) -> bytes:
        """The bytes of a normal token; one that is not spelled in byte characters stands for its own UTF-8."""
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token_text)
        except KeyError:
            return token_text.encode()


def read_pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    """What `tokenizer.ggml.pre` names. Raises UnsupportedTokenizer for a name that is not known here."""
    name = text_at(metadata, "tokenizer.ggml.pre")
    if name is None:
        get_log().warning("tokenizer_pre_missing", used="default", effect="prompts may be cut unlike in training")
        name = "default"
    if (pre_tokenizer := PRE_TOKENIZERS.get(name)) is None:
        raise UnsupportedTokenizer(
            f"tokenizer.ggml.pre is {shown(name)}, known are {', '.join(sorted(PRE_TOKENIZERS))}: "
            "run it on token ids instead of text"
        )
    return pre_tokenizer


def read_merges(metadata: Mapping[str, object]) -> Sequence[str]:
    """The ranked merges. Raises UnsupportedTokenizer without any."""
    merges = texts_at(metadata, "tokenizer.ggml.merges")
    if not merges:
        raise UnsupportedTokenizer("the file has no tokenizer.ggml.merges: run it on token ids instead of text")
    return merges


def _pairs(merges: Sequence[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    dropped = 0
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise CheckpointError(f"tokenizer.ggml.merges has {shown(merge)}, which is not a pair of tokens")
        if left in ids and right in ids and left + right in ids:
            pairs.append((left, right))
        else:
            dropped += 1
    if dropped:
        get_log().warning("tokenizer_merges_dropped", dropped=dropped, kept=len(pairs), reason="not in the vocabulary")
    return pairs


def _byte_of_char() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
