"""A prompt is refused before anything is computed, and a tokenizer that cannot be used takes only text away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import structlog

from expertstream import Checkpoint, ConfigError, ContextOverflow, open_checkpoint
from expertstream_engine import BUNDLED_MODEL, Model, RunSettings
from expertstream_engine.architecture import read_shape
from expertstream_engine.demand import plan_run
from expertstream_engine.prompts import Prompts


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(Path(BUNDLED_MODEL))


def changed(checkpoint: Checkpoint, **keys: object) -> Checkpoint:
    """The checkpoint with other values for keys of its tokenizer."""
    return attrs.evolve(
        checkpoint, metadata={**checkpoint.metadata, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}
    )


def cut_to(checkpoint: Checkpoint, token_count: int) -> Checkpoint:
    """The checkpoint with a shorter vocabulary than its embedding has rows."""
    tokens: Any = checkpoint.metadata["tokenizer.ggml.tokens"]
    types: Any = checkpoint.metadata["tokenizer.ggml.token_type"]
    return changed(checkpoint, tokens=tokens[:token_count], token_type=types[:token_count])


def prompts_of(checkpoint: Checkpoint, context_tokens: int = 512) -> Prompts:
    return Prompts(checkpoint, read_shape(checkpoint), context_tokens)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"model": 7}, "tokenizer.ggml.model is 7, and should be a text"),
        ({"add_bos_token": "false"}, "tokenizer.ggml.add_bos_token is 'false', and should be true or false"),
        ({"tokens": ("a", "a")}, "tokenizer.ggml."),
    ],
)
def test_without_a_usable_tokenizer_text_is_refused_with_the_reason_and_ids_are_taken(
    checkpoint: Checkpoint, keys: dict[str, object], reason: str
) -> None:
    prompts = prompts_of(changed(checkpoint, **keys))
    assert prompts.tokenizer is None
    assert reason in prompts.no_tokenizer_because
    with pytest.raises(ConfigError, match="cannot be tokenized") as refusal:
        prompts.encode("text")
    assert prompts.no_tokenizer_because in str(refusal.value)
    prompts.check([1, 2, 3], 4)


def test_a_generation_goes_on_over_ids_that_the_vocabulary_has_not(checkpoint: Checkpoint) -> None:
    planned = plan_run(Path(BUNDLED_MODEL), RunSettings())
    cut = prompts_of(cut_to(checkpoint, 260))
    with Model(planned, RunSettings()) as whole, Model(planned, RunSettings(), prompts=cut) as padded:
        expected = whole.generate([1, 300, 301], 12, ignore_eos=True)
        generation = padded.generate([1, 300, 301], 12, ignore_eos=True)
        assert whole.tokenizer is not None
        known = [token for _ in expected if (token := expected.tokens[-1]) < 260]
        assert "".join(generation) == whole.tokenizer.decode(known, continues=True)
    assert generation.tokens == expected.tokens
    assert max(generation.tokens) >= 260


def test_a_vocabulary_of_another_size_than_the_embedding_is_told_once(checkpoint: Checkpoint) -> None:
    with structlog.testing.capture_logs() as events:
        prompts_of(checkpoint)
        prompts = prompts_of(cut_to(checkpoint, 300))
    structlog.reset_defaults()
    assert [event for event in events if event["event"] != "tokenizer_merges_dropped"] == [
        {
            "event": "vocabulary_differs_from_embedding",
            "log_level": "info",
            "token_count": 300,
            "embedding_rows": checkpoint.tensors["token_embd.weight"].shape[0],
        }
    ]
    assert prompts.tokenizer is not None
    assert max(prompts.encode("And it came to pass")) < 300


@pytest.mark.parametrize("text", ["ab\udc80", "ab\ud800c"])
def test_a_lone_surrogate_is_refused_with_its_place(checkpoint: Checkpoint, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"lone surrogate, U\+{ord(text[2]):04X}, at character 2"):
        prompts_of(checkpoint).encode(text)


def test_text_that_no_tokens_could_make_short_enough_is_refused_unread(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(checkpoint, context_tokens=512)
    assert prompts.tokenizer is not None
    longest = max(map(len, checkpoint.metadata["tokenizer.ggml.tokens"]))  # type: ignore[call-overload]  # texts
    assert prompts.encode("a" * 512 * longest)
    monkeypatch.setattr(prompts.tokenizer, "encode", lambda text: pytest.fail("it was tokenized"))
    with pytest.raises(ContextOverflow, match="3000000 characters has at least"):
        prompts.encode("a" * 3_000_000)
    with pytest.raises(ContextOverflow, match="at least 513 tokens"):
        prompts.encode("a" * (512 * longest + 1))
