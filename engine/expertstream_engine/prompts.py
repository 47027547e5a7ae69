"""What a model takes as a prompt: text where its tokenizer is known, token ids always. Nothing is loaded for it.

It refuses, before any weight is read, what could not be generated from.
"""

from __future__ import annotations

from collections.abc import Sequence

from expertstream import Checkpoint, CheckpointError, ConfigError, ContextOverflow
from expertstream.log import get_log
from expertstream_engine.architecture import ModelShape
from expertstream_engine.tokenizer import Tokenizer, load_tokenizer


class Prompts:
    """Prompts for one checkpoint in a context of `context_tokens`. Safe from any thread.

    `tokenizer` is None where the model's is damaged or of a kind that this version does not know;
    `no_tokenizer_because` then says why.
    """

    def __init__(self, checkpoint: Checkpoint, shape: ModelShape, context_tokens: int) -> None:
        self._trained_context = shape.trained_context
        self.context_tokens = context_tokens
        self.tokenizer: Tokenizer | None = None
        self.no_tokenizer_because = ""
        self._vocabulary_size = checkpoint.tensors["token_embd.weight"].shape[0]
        try:
            self.tokenizer = load_tokenizer(checkpoint.metadata)
        except CheckpointError as error:  # the rest of the file may be sound, and is used without text
            self.no_tokenizer_because = str(error)
            return
        if self.tokenizer.vocab_size != self._vocabulary_size:
            # Embeddings are often padded to a round number of rows. What is beyond the tokens has no text.
            get_log().info(
                "vocabulary_differs_from_embedding",
                token_count=self.tokenizer.vocab_size,
                embedding_rows=self._vocabulary_size,
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with BOS where the file says so.

        Raises ConfigError without a tokenizer and for text that is not Unicode, ContextOverflow for text that is too
        long for the context whatever its tokens are.
        """
        if self.tokenizer is None:
            raise ConfigError(f"this model's text cannot be tokenized: {self.no_tokenizer_because}; give token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the prompt has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start},"
                " which is no text; was it decoded from bytes that are not UTF-8?"
            ) from None
        if (fewest := self.tokenizer.fewest_tokens(text)) > self.context_tokens:
            # Said before the text is tokenized, which takes seconds for a megabyte.
            raise ContextOverflow(
                f"a prompt of {len(text)} characters has at least {fewest} tokens, and the context"
                f" {self.context_tokens}; shorten it{self._or_more_context()}"
            )
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
            raise ConfigError(f"{max_tokens} tokens to generate were asked for; at least 1 is needed")
        if not tokens:
            raise ConfigError("the prompt has no tokens; give some text or token ids")
        self.check_ids(tokens)
        if len(tokens) + max_tokens > self.context_tokens:
            raise ContextOverflow(
                f"a prompt of {len(tokens)} token{'' if len(tokens) == 1 else 's'} and {max_tokens} to generate do not"
                f" fit the context of {self.context_tokens}; ask for fewer tokens{self._or_more_context()}"
            )

    def _or_more_context(self) -> str:
        if self.context_tokens >= self._trained_context:
            return ": the model was trained for no more"
        return f" or a larger context, up to the {self._trained_context} that the model was trained for"
