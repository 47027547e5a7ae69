"""The forward pass of a decoder with routed experts, over any Ops and any streamer.

It owns the KV cache and the order in which experts are summed: ascending, so that neither slots nor timing nor
policy can change a bit of the result.
"""

from __future__ import annotations

import numpy as np

from expertstream import ContextOverflow, ExpertStreamer, Lease
from expertstream_engine.architecture import ModelShape
from expertstream_engine.ops.protocol import F32, I64, Ops
from expertstream_engine.weights import AttentionWeights, RoutedWeights, Weights


class MoeModel:
    """One sequence through one model. Called from one thread."""

    def __init__(
        self, shape: ModelShape, weights: Weights, ops: Ops, streamer: ExpertStreamer, context_tokens: int
    ) -> None:
        """Allocates the KV cache for `context_tokens` positions; the system gives its pages as they are written."""
        self._shape = shape
        self._weights = weights
        self._ops = ops
        self._streamer = streamer
        self.context_tokens = context_tokens
        self.position = 0
        cache = (shape.block_count, shape.kv_head_count, context_tokens, shape.head_size)
        self._keys: F32 = np.zeros(cache, np.float32)
        self._values: F32 = np.zeros(cache, np.float32)
        self._cos, self._sin = _rope_tables(shape, weights.rope_factors, context_tokens)
        self._slot_addresses = np.array(
            [streamer.device_view(slot).__array_interface__["data"][0] for slot in range(streamer.slot_count)], np.int64
        )

    def reset(self) -> None:
        """Forget the sequence; experts in slots stay."""
        self.position = 0

    def forward(self, ids: I64, *, all_logits: bool = False) -> F32:
        """Logits after the tokens `ids` (int64): (1, vocabulary) of the last or, if asked, one row for each.

        The tokens continue the sequence. Raises ContextOverflow before anything is computed, and what the streamer
        raises; after that the sequence is as it was before the call.
        """
        if not ids.size:
            raise ValueError("forward needs at least one token")
        if self.position + ids.size > self.context_tokens:
            raise ContextOverflow(
                f"{ids.size} more tokens after {self.position} do not fit the context of {self.context_tokens};"
                " ask for a larger context or fewer tokens"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self._weights.embedding.rows:
            raise ValueError(f"token ids must lie in 0 to {self._weights.embedding.rows - 1}: {ids.tolist()}")
        self._streamer.begin_pass(ids.size)
        x = self._ops.embed(self._weights.embedding, ids)
        for block in range(self._shape.block_count):
            x += self._attend(block, self._weights.attention[block], x)
            x += self._route(block, self._weights.routed[block], x)
        self.position += ids.size
        last = x if all_logits else x[-1:]
        normed = self._ops.rms_norm(last, self._weights.output_norm, self._shape.norm_epsilon)
        return self._ops.matmul(normed, self._weights.output)[0]

    def _attend(self, block: int, weights: AttentionWeights, x: F32) -> F32:
        shape, ops = self._shape, self._ops
        tokens, first = len(x), self.position
        normed = ops.rms_norm(x, weights.norm, shape.norm_epsilon)
        query, key, value = ops.matmul(normed, weights.query, weights.key, weights.value)
        if shape.query_key_norm == "all" and weights.query_norm is not None and weights.key_norm is not None:
            query = ops.rms_norm(query, weights.query_norm, shape.norm_epsilon)
            key = ops.rms_norm(key, weights.key_norm, shape.norm_epsilon)
        query = query.reshape(tokens, shape.head_count, shape.head_size)
        key = key.reshape(tokens, shape.kv_head_count, shape.head_size)
        if shape.query_key_norm == "head" and weights.query_norm is not None and weights.key_norm is not None:
            query = ops.rms_norm(query, weights.query_norm, shape.norm_epsilon)
            key = ops.rms_norm(key, weights.key_norm, shape.norm_epsilon)
        cos, sin = self._cos[first : first + tokens], self._sin[first : first + tokens]
        ops.rope(query, cos, sin, shape.interleaved_rope)
        ops.rope(key, cos, sin, shape.interleaved_rope)
        self._keys[block, :, first : first + tokens] = key.transpose(1, 0, 2)
        self._values[block, :, first : first + tokens] = value.reshape(key.shape).transpose(1, 0, 2)
        heads = ops.attention(query, self._keys[block], self._values[block], first, shape.head_size**-0.5)
        return ops.matmul(heads, weights.output)[0]

    def _route(self, block: int, weights: RoutedWeights, x: F32) -> F32:
        shape, ops = self._shape, self._ops
        normed = ops.rms_norm(x, weights.norm, shape.norm_epsilon)
        chosen, shares = ops.top_k(
            ops.matmul(normed, weights.router)[0], shape.experts_per_token, shape.normalized_top_k
        )
        # Expert-major: rows sorted by expert, each expert's rows by token.
        order = np.argsort(chosen, axis=None, kind="stable")
        tokens = order // shape.experts_per_token
        row_shares = shares.reshape(-1)[order]
        total = np.zeros_like(x)
        if len(x) == 1:
            self._route_token(block, weights, normed, chosen.reshape(-1)[order], tokens, row_shares, total)
        else:
            counts = np.bincount(chosen.reshape(-1), minlength=shape.expert_count)
            self._route_batch(block, weights, normed, counts, tokens, row_shares, total)
        return total

    def _route_token(
        self, block: int, weights: RoutedWeights, x: F32, experts: I64, tokens: I64, shares: F32, total: F32
    ) -> None:
        """Decode: experts in slots are computed while the missing ones are read."""
        with self._streamer.acquire(block, experts, wait=False) as lease:
            ready, pending = lease.ready, lease.pending
            if not pending.size:
                rows = self._expert_rows(weights, lease, ready, x, np.arange(ready.size + 1), tokens)
            else:
                rows = np.empty((experts.size, self._shape.hidden_size), np.float32)
                if ready.size:
                    starts = np.arange(ready.size + 1)
                    rows[ready] = self._expert_rows(weights, lease, ready, x, starts, tokens[ready])
                lease.wait()
                starts = np.arange(pending.size + 1)
                rows[pending] = self._expert_rows(weights, lease, pending, x, starts, tokens[pending])
        self._ops.add_weighted(total, rows, tokens, shares)

    def _route_batch(
        self, block: int, weights: RoutedWeights, x: F32, counts: I64, tokens: I64, shares: F32, total: F32
    ) -> None:
        """Prefill: each expert is read once for all tokens that chose it, in ascending order."""
        experts = np.flatnonzero(counts)
        first_row = 0
        steps = self._streamer.rounds(block, experts, counts[experts])
        try:
            for lease in steps:
                lengths = counts[lease.experts]
                end_row = first_row + int(lengths.sum())
                starts = np.concatenate(([0], np.cumsum(lengths)))
                rows_tokens = tokens[first_row:end_row]
                rows = self._expert_rows(weights, lease, np.arange(len(lease)), x, starts, rows_tokens)
                self._ops.add_weighted(total, rows, rows_tokens, shares[first_row:end_row])
                first_row = end_row
        finally:
            steps.close()

    def _expert_rows(
        self, weights: RoutedWeights, lease: Lease, positions: I64, x: F32, starts: I64, tokens: I64
    ) -> F32:
        bases = self._slot_addresses[lease.slots[positions]]
        addresses = bases[:, None] + weights.positions[lease.experts[positions]]
        return self._ops.routed_ffn(weights.ffn, addresses, x, starts, tokens)


def _rope_tables(shape: ModelShape, factors: F32 | None, context_tokens: int) -> tuple[F32, F32]:
    """cos and sin of every position's angles, (context, rope_size / 2) float32, computed in float64."""
    frequencies = shape.rope_base ** (-np.arange(0, shape.rope_size, 2, dtype=np.float64) / shape.rope_size)
    if factors is not None:
        frequencies /= factors
    angles = np.outer(np.arange(context_tokens, dtype=np.float64) / shape.rope_scale, frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
