"""What a model takes as a prompt: text where its tokenizer is known, token ids always. Nothing is loaded for it.

It refuses, before any weight is read, what could not be generated from.
"""

from __future__ import annotations

from collections.abc import Sequence

from expertstream import Checkpoint, ConfigError, ContextOverflow
from expertstream_engine.tokenizer import Tokenizer, UnsupportedTokenizer, load_tokenizer


class Prompts:
    """Prompts for one checkpoint in a context of `context_tokens`. Safe from any thread.

    `tokenizer` is None where this version does not know the model's; `no_tokenizer_because` then says why.
    """

    def __init__(self, checkpoint: Checkpoint, context_tokens: int) -> None:
        self.context_tokens = context_tokens
        self.tokenizer: Tokenizer | None = None
        self.no_tokenizer_because = ""
        self._vocabulary_size = checkpoint.tensors["token_embd.weight"].shape[0]
        try:
            self.tokenizer = load_tokenizer(checkpoint.metadata)
        except UnsupportedTokenizer as error:
            self.no_tokenizer_because = str(error)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with BOS where the file says so. Raises ConfigError without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError(f"this model's text cannot be tokenized: {self.no_tokenizer_because}; give token ids")
        return self.tokenizer.encode(text)

    def check_ids(self, tokens: Sequence[int]) -> None:
        """Raise ConfigError for ids outside the vocabulary."""
        wrong = [token for token in tokens if not 0 <= token < self._vocabulary_size]
        if wrong:
            raise ConfigError(
                f"token ids {wrong[:8]} are not in the vocabulary of {self._vocabulary_size}:"
                f" use 0 to {self._vocabulary_size - 1}"
            )

    def check(self, tokens: Sequence[int], max_tokens: int) -> None:
        """Raise ConfigError or ContextOverflow if `max_tokens` cannot be generated after these tokens."""
        if max_tokens < 1:
            raise ConfigError(f"{max_tokens} tokens were asked for; at least 1 is needed")
        if not tokens:
            raise ConfigError("the prompt has no tokens; give some text or token ids")
        self.check_ids(tokens)
        if len(tokens) + max_tokens > self.context_tokens:
            raise ContextOverflow(
                f"a prompt of {len(tokens)} tokens and {max_tokens} to generate do not fit the context of"
                f" {self.context_tokens}; ask for fewer tokens or a larger context"
            )
