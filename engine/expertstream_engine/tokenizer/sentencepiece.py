"""SentencePiece BPE: the pair of neighbours whose union is the best-scored token is merged, until none is a token.

It encodes plain text; special tokens in it are its caller's. It is our own code because `tokenizers` ranks pairs and
not their unions, so equal scores and overlapping pairs come out differently. Source of the rule: SentencePiece
(bpe_model.cc).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from expertstream.errors import CheckpointError
from expertstream_engine.tokenizer.metadata import numbers_at
from expertstream_engine.tokenizer.vocabulary import TokenType, Vocabulary

_SPACE = "\u2581"


class SentencePieceBpe:
    """Encodes greedily by score, the leftmost pair first among equals; safe from any thread."""

    drops_text = False

    def __init__(self, vocabulary: Vocabulary, scores: Sequence[float], *, prefixes_space: bool) -> None:
        """`scores` are of all tokens, by id."""
        self.prefixes_space = prefixes_space
        # Control and byte tokens stay out: no text may spell one by merging.
        self._ids = vocabulary.ids_of(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        self._scores = scores
        self._byte_ids = _byte_ids(vocabulary)
        self._unknown_id = vocabulary.unknown_id

    def encode(self, text: str) -> list[int]:
        """The ids of plain text. Raises UnicodeEncodeError for lone surrogates, which have no UTF-8."""
        pieces = self._merged(text.replace(" ", _SPACE))
        return [token for piece in pieces for token in self._ids_of_piece(piece)]

    def bytes_of(self, token_text: str) -> bytes:
        """The bytes of a normal token."""
        return token_text.replace(_SPACE, " ").encode()

    def _merged(self, text: str) -> Iterator[str]:
        pieces: list[str] = list(text)
        before = list(range(-1, len(pieces) - 1))
        after = [*range(1, len(pieces)), len(pieces)]
        heap: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < len(pieces):
                union = pieces[left] + pieces[right]
                if (token := self._ids.get(union)) is not None:
                    heapq.heappush(heap, (-self._scores[token], left, right, union))

        for right in range(1, len(pieces)):
            offer(right - 1, right)
        while heap:
            _, left, right, union = heapq.heappop(heap)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != len(union):
                continue  # one of the two has been merged since
            pieces[left], pieces[right] = union, ""
            after[left] = after[right]
            if after[right] < len(pieces):
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        return filter(None, pieces)

    def _ids_of_piece(self, piece: str) -> list[int]:
        if (token := self._ids.get(piece)) is not None:
            return [token]
        tokens = [self._byte_ids.get(byte) for byte in piece.encode()]
        known = [token for token in tokens if token is not None]
        return known if len(known) == len(tokens) else [self._unknown_id]


def read_scores(metadata: Mapping[str, object], token_count: int) -> list[float]:
    """The scores of all tokens, by id. Raises CheckpointError where one is missing or is no number."""
    scores = numbers_at(metadata, "tokenizer.ggml.scores", "numbers", token_count)
    if scores is None:
        raise CheckpointError("the file has no tokenizer.ggml.scores, which this kind of tokenizer merges by")
    if (wrong := np.flatnonzero(np.isnan(scores))).size:
        raise CheckpointError(f"tokenizer.ggml.scores has {scores[wrong[0]]} for the id {wrong[0]}")
    return [float(score) for score in scores.tolist()]


def _byte_ids(vocabulary: Vocabulary) -> dict[int, int]:
    tokens = vocabulary.ids_of(TokenType.BYTE)
    return {byte: tokens[text] for byte in range(256) if (text := f"<0x{byte:02X}>") in tokens}
