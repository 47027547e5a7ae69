"""What a model is, read from its checkpoint's metadata: shapes, constants and the few choices that differ.

Architectures are told by metadata, never by a file name. What this version would compute wrongly is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import frozen

from expertstream import Checkpoint, UnsupportedCheckpoint

_SOFTMAX_GATING = 1  # GGUF's expert_gating_func; the key is absent in files older than it


@frozen
class _Family:
    """The choices in which the supported architectures differ."""

    interleaved_rope: bool
    query_key_norm: str  # "none", "head": over each head, "all": over all heads at once
    normalized_top_k: bool


FAMILIES: Mapping[str, _Family] = {
    "qwen3moe": _Family(interleaved_rope=False, query_key_norm="head", normalized_top_k=True),
    "olmoe": _Family(interleaved_rope=False, query_key_norm="all", normalized_top_k=False),
    "llama": _Family(interleaved_rope=True, query_key_norm="none", normalized_top_k=True),
}
"""Supported values of general.architecture."""


@frozen
class ModelShape:
    """A decoder with grouped-query attention and routed experts; sizes in elements."""

    architecture: str
    name: str
    block_count: int
    hidden_size: int
    head_count: int
    kv_head_count: int
    head_size: int
    rope_size: int
    rope_base: float
    rope_scale: float
    interleaved_rope: bool
    query_key_norm: str
    norm_epsilon: float
    expert_count: int
    experts_per_token: int
    normalized_top_k: bool
    trained_context: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one position takes in the float32 caches of keys and values of all blocks."""
        return self.block_count * 2 * self.kv_head_count * self.head_size * 4


def read_shape(checkpoint: Checkpoint) -> ModelShape:
    """The shape of the checkpoint's model.

    Raises UnsupportedCheckpoint for another architecture, for a missing or impossible value and for variants
    (rope scalings, sliding windows, other gatings) that this version would compute wrongly; each names its key.
    """
    metadata = checkpoint.metadata
    where = str(checkpoint.files[0])
    architecture = str(metadata.get("general.architecture"))
    if architecture not in FAMILIES:
        raise UnsupportedCheckpoint(
            f"{where}: the architecture is {architecture!r}; this version runs {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[architecture]
    keys = _Keys(metadata, architecture, where)
    _refuse_variants(keys)
    hidden, heads = keys.needed_count("embedding_length"), keys.needed_count("attention.head_count")
    head_size = keys.count("attention.key_length", hidden // heads)
    kv_heads = keys.count("attention.head_count_kv", heads)
    keys.must("attention.value_length", keys.count("attention.value_length", head_size) == head_size)
    keys.must("attention.head_count_kv", kv_heads > 0 and heads % kv_heads == 0)
    rope_size = keys.count("rope.dimension_count", head_size)
    keys.must("rope.dimension_count", 0 < rope_size <= head_size and rope_size % 2 == 0)
    scaling = keys.text("rope.scaling.type", "none")
    return ModelShape(
        architecture=architecture,
        name=str(metadata.get("general.name", checkpoint.files[0].stem)),
        block_count=keys.needed_count("block_count"),
        hidden_size=hidden,
        head_count=heads,
        kv_head_count=kv_heads,
        head_size=head_size,
        rope_size=rope_size,
        rope_base=keys.number("rope.freq_base", 10000.0),
        rope_scale=keys.number("rope.scaling.factor", 1.0) if scaling == "linear" else 1.0,
        interleaved_rope=family.interleaved_rope,
        query_key_norm=family.query_key_norm,
        norm_epsilon=keys.needed_number("attention.layer_norm_rms_epsilon"),
        expert_count=checkpoint.layers[0].expert_count,
        experts_per_token=checkpoint.experts_per_token,
        normalized_top_k=family.normalized_top_k,
        trained_context=keys.needed_count("context_length"),
    )


class _Keys:
    """The architecture's own metadata keys, typed."""

    def __init__(self, metadata: Mapping[str, object], architecture: str, where: str) -> None:
        self._metadata = metadata
        self._prefix = architecture + "."
        self._where = where

    def number(self, key: str, default: float) -> float:
        value = self._metadata.get(self._prefix + key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.refusal(key, "a number from 0 up is expected")
        return float(value)

    def count(self, key: str, default: int) -> int:
        value = self._metadata.get(self._prefix + key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refusal(key, "one whole number from 0 up is expected")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._metadata.get(self._prefix + key, default)
        if not isinstance(value, str):
            raise self.refusal(key, "text is expected")
        return value

    def needed_count(self, key: str) -> int:
        return int(self._needed(key, self.count(key, 0)))

    def needed_number(self, key: str) -> float:
        return self._needed(key, self.number(key, 0.0))

    def _needed(self, key: str, value: float) -> float:
        if not value:
            raise self.refusal(key, "it is missing" if self._prefix + key not in self._metadata else "it is zero")
        return value

    def must(self, key: str, holds: bool) -> None:
        if not holds:
            raise self.refusal(key, "it does not fit the model's other sizes")

    def refusal(self, key: str, why: str) -> UnsupportedCheckpoint:
        value = self._metadata.get(self._prefix + key)
        return UnsupportedCheckpoint(f"{self._where}: {self._prefix}{key} is {value!r}: {why}")


def _refuse_variants(keys: _Keys) -> None:
    if keys.text("rope.scaling.type", "none") not in ("none", "linear"):
        raise keys.refusal("rope.scaling.type", "this version knows none and linear")
    for key in ("attention.sliding_window", "attention.clamp_kqv", "leading_dense_block_count"):
        if keys.number(key, 0.0):
            raise keys.refusal(key, "this version does not compute it for this architecture")
    if keys.count("expert_gating_func", _SOFTMAX_GATING) not in (0, _SOFTMAX_GATING):
        raise keys.refusal("expert_gating_func", "this version knows softmax (1)")
    if keys.number("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise keys.refusal("expert_weights_scale", "this version knows 1")
    if keys.count("expert_shared_count", 0):
        raise keys.refusal("expert_shared_count", "this version knows no shared experts for this architecture")
