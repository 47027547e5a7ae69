"""The forward pass of a decoder with routed experts, over any Ops and any streamer.

It owns the KV cache and the order in which experts are summed: ascending, so that neither slots nor timing nor
policy can change a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np

from expertstream import ContextOverflow, ExpertStreamer, Lease
from expertstream_engine.architecture import ModelShape
from expertstream_engine.ops.protocol import F32, I64, Ops, T
from expertstream_engine.weights import RoutedWeights, Weights


class MoeModel:
    """One sequence through one model. Called from one thread."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        ops: Ops,
        streamer: ExpertStreamer,
        slot_addresses: I64,
        context_tokens: int,
    ) -> None:
        """Allocates the KV cache for `context_tokens` positions; host memory gives its pages as they are written.

        `slot_addresses` (slots,) is where each slot of the streamer begins for kernels.
        """
        self._shape = shape
        self._weights = weights
        self._ops = ops
        self._streamer = streamer
        self.context_tokens = context_tokens
        self.position = 0
        cache = (shape.block_count, shape.kv_head_count, context_tokens, shape.head_size)
        self._keys: F32 = ops.zeros(*cache)
        self._values: F32 = ops.zeros(*cache)
        self._row: F32 = ops.zeros(1, shape.hidden_size)
        self._cos, self._sin = map(ops.array, _rope_tables(shape, weights.rope_factors, context_tokens))
        self._slot_addresses = slot_addresses

    def reset(self) -> None:
        """Forget the sequence; experts in slots stay."""
        self.position = 0

    @np.errstate(invalid="ignore", over="ignore")  # damaged weights are told of by their logits
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
        ops, tokens = self._ops, ids.size
        x = ops.embed(self._weights.embedding, ids)
        if tokens == 1:
            # Decode does the same work in the same memory for each token, so that a device can replay it.
            ops.copy(self._row, x)
            x = self._row
        repeated = ops.repeated if tokens == 1 else _once
        first = ops.position(self.position)
        angles = repeated("angles", lambda: (ops.rows(self._cos, first, tokens), ops.rows(self._sin, first, tokens)))
        for block in range(self._shape.block_count):
            normed, logits = repeated(("attend", block), partial(self._attend, block, x, first, *angles))
            self._route(block, normed, logits, x)
        logits = ops.to_host(repeated(("logits", all_logits), lambda: self._logits(x if all_logits else x[-1:])))
        self._streamer.raise_late_failure()  # the device has ended, and may have read what never arrived
        self.position += tokens
        return logits

    def _logits(self, x: F32) -> F32:
        normed = self._ops.rms_norm(x, self._weights.output_norm, self._shape.norm_epsilon)
        return self._ops.matmul(normed, self._weights.output)[0]

    def _attend(self, block: int, x: F32, first: Any, cos: F32, sin: F32) -> tuple[F32, F32]:
        """Add a block's attention to x; x as the experts take it, and what the router says of it."""
        shape, ops, weights, routed = (
            self._shape,
            self._ops,
            self._weights.attention[block],
            self._weights.routed[block],
        )
        tokens = len(x)
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
        ops.rope(query, cos, sin, shape.interleaved_rope)
        ops.rope(key, cos, sin, shape.interleaved_rope)
        ops.append(self._keys[block], key, first)
        ops.append(self._values[block], value.reshape(key.shape), first)
        heads = ops.attention(query, self._keys[block], self._values[block], first, shape.head_size**-0.5)
        ops.add(x, ops.matmul(heads, weights.output)[0])
        normed = ops.rms_norm(x, routed.norm, shape.norm_epsilon)
        return normed, ops.matmul(normed, routed.router)[0]

    def _route(self, block: int, normed: F32, logits: F32, x: F32) -> None:
        """Add a block's experts to x."""
        shape, ops, weights = self._shape, self._ops, self._weights.routed[block]
        chosen, shares = ops.top_k(logits, shape.experts_per_token, shape.normalized_top_k)
        # Expert-major: rows sorted by expert, each expert's rows by token.
        order = np.argsort(chosen, axis=None, kind="stable")
        row_shares = shares.reshape(-1)[order]
        if len(x) == 1:
            self._route_token(block, weights, normed, chosen.reshape(-1)[order], row_shares, x)
            return
        tokens = order // shape.experts_per_token
        counts = np.bincount(chosen.reshape(-1), minlength=shape.expert_count)
        total = ops.zeros(*x.shape)
        self._route_batch(block, weights, normed, counts, tokens, row_shares, total)
        ops.add(x, total)

    def _route_token(self, block: int, weights: RoutedWeights, normed: F32, experts: I64, shares: F32, x: F32) -> None:
        """Decode: all experts at once where none is missing, or where work on a stream waits for them by itself."""
        ops = self._ops
        lease = self._streamer.acquire(block, experts, wait=False)
        try:
            if lease.pending.size and ops.stream is None:
                self._route_token_as_it_comes(weights, lease, normed, shares, x)
            else:
                lease.wait(ops.stream)
                every = np.arange(len(lease))
                ops.add_routed_token(x, weights.ffn, self._addresses(weights, lease, every), normed, shares)
        finally:
            lease.release(ops.stream)

    def _route_token_as_it_comes(self, weights: RoutedWeights, lease: Lease, normed: F32, shares: F32, x: F32) -> None:
        """Experts in slots are computed while the missing ones are read; the sum is the same."""
        ops = self._ops
        tokens = np.zeros(len(lease), np.int64)
        rows = ops.empty(len(lease), self._shape.hidden_size)

        def compute(positions: I64) -> None:
            if positions.size:
                starts = np.arange(positions.size + 1)
                of_these = self._expert_rows(weights, lease, positions, normed, starts, tokens[positions])
                ops.scatter(rows, positions, of_these)

        compute(lease.ready)
        lease.wait()
        compute(lease.pending)
        total = ops.zeros(*x.shape)
        ops.add_weighted(total, rows, tokens, shares)
        ops.add(x, total)

    def _route_batch(
        self, block: int, weights: RoutedWeights, x: F32, counts: I64, tokens: I64, shares: F32, total: F32
    ) -> None:
        """Prefill: each expert is read once for all tokens that chose it, in ascending order."""
        experts = np.flatnonzero(counts)
        first_row = 0
        steps = self._streamer.rounds(block, experts, counts[experts], stream=self._ops.stream)
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
        return self._ops.routed_ffn(weights.ffn, self._addresses(weights, lease, positions), x, starts, tokens)

    def _addresses(self, weights: RoutedWeights, lease: Lease, positions: I64) -> I64:
        """Where gate, up and down of the experts at these positions of the lease begin, (positions, 3)."""
        bases = self._slot_addresses[lease.slots[positions]]
        addresses: I64 = bases[:, None] + weights.positions[lease.experts[positions]]
        return addresses


def _once(key: Hashable, work: Callable[[], T]) -> T:
    return work()


def _rope_tables(shape: ModelShape, factors: F32 | None, context_tokens: int) -> tuple[F32, F32]:
    """cos and sin of every position's angles, (context, rope_size / 2) float32, computed in float64."""
    frequencies = shape.rope_base ** (-np.arange(0, shape.rope_size, 2, dtype=np.float64) / shape.rope_size)
    if factors is not None:
        frequencies /= factors
    angles = np.outer(np.arange(context_tokens, dtype=np.float64) / shape.rope_scale, frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
