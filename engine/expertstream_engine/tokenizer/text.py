"""Text to token ids and back, special tokens included, for any kind of vocabulary.

What an ordinary token means is the vocabulary's kind; here is what all kinds share: special tokens, BOS, and bytes
that only make text together.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from expertstream.errors import UsageError
from expertstream_engine.tokenizer.byte_level import ByteLevelBpe, read_merges, read_pre_tokenizer
from expertstream_engine.tokenizer.metadata import bool_at, shown, text_at
from expertstream_engine.tokenizer.sentencepiece import SentencePieceBpe, read_scores
from expertstream_engine.tokenizer.vocabulary import TokenType, UnsupportedTokenizer, Vocabulary, read_vocabulary


def load_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that a GGUF's metadata describe.

    Raises UnsupportedTokenizer for a kind that is not known here, CheckpointError if the metadata are damaged or
    contradict themselves. Either way the model still runs on token ids.
    """
    kind = text_at(metadata, "tokenizer.ggml.model")
    add_bos = bool_at(metadata, "tokenizer.ggml.add_bos_token")
    if kind == "gpt2":
        vocabulary = read_vocabulary(metadata)
        pre_tokenizer = read_pre_tokenizer(metadata)
        byte_level = ByteLevelBpe(vocabulary, read_merges(metadata), pre_tokenizer)
        return Tokenizer(vocabulary, byte_level, add_bos=pre_tokenizer.adds_bos if add_bos is None else add_bos)
    if kind == "llama":
        vocabulary = read_vocabulary(metadata, bos_id=1, eos_id=2)
        scores = read_scores(metadata, len(vocabulary.texts))
        prefixes_space = bool_at(metadata, "tokenizer.ggml.add_space_prefix") is not False
        sentencepiece = SentencePieceBpe(vocabulary, scores, prefixes_space=prefixes_space)
        return Tokenizer(vocabulary, sentencepiece, add_bos=add_bos is not False)
    raise UnsupportedTokenizer(
        f"tokenizer.ggml.model is {shown(kind)}, known are 'gpt2' and 'llama': run it on token ids instead of text"
    )


class Tokenizer:
    """Turns text into the ids of one vocabulary and back. Safe from any thread."""

    def __init__(self, vocabulary: Vocabulary, kind: _Kind, *, add_bos: bool) -> None:
        self._vocabulary = vocabulary
        self._kind = kind
        self._add_bos = add_bos and vocabulary.bos_id is not None
        user_defined = vocabulary.ids_of(TokenType.USER_DEFINED)
        self._special_ids = user_defined | vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
        self._user_defined_pattern = _any_of(user_defined)
        self._special_pattern = _any_of(self._special_ids)
        self._longest_text = max(map(len, vocabulary.texts))

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return len(self._vocabulary.texts)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, where the vocabulary has one."""
        return self._vocabulary.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens after which a model has nothing more to say: end of text, of turn, of message."""
        return self._vocabulary.eos_ids

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """The ids of `text`, with BOS before them if `add_bos` says so; None leaves that to the checkpoint.

        Control tokens spelled in the text are text, unless `parse_special`: leave it False for text that a stranger
        wrote. Raises UsageError if BOS is asked of a vocabulary without, UnicodeEncodeError for lone surrogates.
        """
        ids = []
        if self._add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise UsageError("add_bos=True, but the checkpoint names no BOS token; pass add_bos=None")
            ids.append(self.bos_id)
        starts_words = True
        for piece in self._pieces(text, parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                prefix = " " if starts_words and self._kind.prefixes_space else ""
                ids.extend(self._kind.encode(prefix + piece))
            starts_words = isinstance(piece, int)
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least: at once, and for any text, where `encode` may take seconds."""
        if self._kind.drops_text:
            return 0
        # A token stands for no more characters than it is spelled with, or for the one that no other token spells.
        return -(-len(text) // max(1, self._longest_text))

    def decode(self, ids: Iterable[int], *, continues: bool = False, show_control: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        `continues`: the ids follow others, so a space that begins them was not put there by `encode`. `show_control`:
        spell control tokens too. Raises UsageError for an id that the vocabulary has not.
        """
        ids = list(ids)
        for token in ids:
            self._check(token)
        stream = self.stream(continues=continues, show_control=show_control)
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def stream(self, *, continues: bool = False, show_control: bool = False) -> TokenStream:
        """A decoder for ids that come one by one; the options are those of `decode`."""
        strips_space = self._kind.prefixes_space and not continues
        return TokenStream(self, strips_space=strips_space, show_control=show_control)

    def token_bytes(self, token: int, *, show_control: bool = False) -> bytes:
        """What one token stands for, which may be part of a character. Raises UsageError for an unknown id."""
        self._check(token)
        text = self._vocabulary.texts[token]
        match self._vocabulary.types[token]:
            case TokenType.NORMAL:
                return self._kind.bytes_of(text)
            case TokenType.USER_DEFINED:
                return text.encode()
            case TokenType.BYTE:
                return bytes.fromhex(text.removeprefix("<0x").removesuffix(">"))
            case TokenType.CONTROL | TokenType.UNKNOWN if show_control:
                return text.encode()
            case _:
                return b""

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise UsageError(f"token id {token}, and the vocabulary has the ids 0 to {self.vocab_size - 1}")

    def _pieces(self, text: str, parse_special: bool) -> Iterator[str | int]:
        pattern = self._special_pattern if parse_special else self._user_defined_pattern
        end = 0
        for match in pattern.finditer(text) if pattern else ():
            if end < match.start():
                yield text[end : match.start()]
            yield self._special_ids[match.group()]
            end = match.end()
        if end < len(text):
            yield text[end:]


class TokenStream:
    """Turns token ids into text as they come; for one thread. Made by `Tokenizer.stream`."""

    def __init__(self, tokenizer: Tokenizer, *, strips_space: bool, show_control: bool) -> None:
        self._tokenizer = tokenizer
        self._strips_space = strips_space
        self._show_control = show_control
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes, often none; never half of one.

        An id beyond the vocabulary has none: a model whose embedding was padded has such ids, and may choose one.
        """
        if token >= self._tokenizer.vocab_size:
            return ""
        piece = self._tokenizer.token_bytes(token, show_control=self._show_control)
        if self._strips_space and piece:
            piece = piece.removeprefix(b" ")
            self._strips_space = False
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed. The stream begins anew after it."""
        return self._utf8.decode(b"", final=True)


class _Kind(Protocol):
    """What one kind of vocabulary knows about ordinary tokens."""

    @property
    def prefixes_space(self) -> bool:
        """Whether a text that begins, or follows a special token, is encoded with a space before it."""
        ...

    @property
    def drops_text(self) -> bool:
        """Whether there are characters that `encode` leaves out, because no token spells them."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def bytes_of(self, token_text: str) -> bytes: ...


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    # Longest first: of two special tokens that begin alike, the longer is meant.
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
