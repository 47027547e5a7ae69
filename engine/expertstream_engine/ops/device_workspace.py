"""How much memory a device's kernels take beside weights, slots and KV cache, from shapes alone.

The arrays are those of `cupy_ops`, which this module does not import: a plan is made also where it cannot be.
"""

from __future__ import annotations

from collections.abc import Collection

from expertstream_engine.architecture import ModelShape
from expertstream_engine.kernels.row_dots import ROW_DOTS
from expertstream_engine.ops.protocol import ExpertFfn

_RECORD_BYTES = {"F32": (1, 0), "F16": (1, 4), "BF16": (1, 4), "Q8_0": (32, 36), "Q8_K": (256, 292)}
"""Columns of a block of rounded activations, and its bytes on a device; what is not rounded is not copied either."""


def device_workspace_bytes(
    shape: ModelShape,
    batch: int,
    context: int,
    vocabulary: int,
    type_names: Collection[str],
    ffns: Collection[ExpertFfn],
) -> int:
    """Bytes for passes over up to `batch` tokens in a context of `context`, with weights of these types.

    A prefill's arrays and those that decode keeps for each block, because its launches are recorded with them.
    """
    forms = {ROW_DOTS[type_name].activation for type_name in type_names}

    def rounded(columns: int) -> int:
        return max(-(-columns // _RECORD_BYTES[form][0]) * _RECORD_BYTES[form][1] for form in forms)

    query, kv = shape.head_count * shape.head_size, shape.kv_head_count * shape.head_size
    hidden, top_k = shape.hidden_size, shape.experts_per_token
    width = max((ffn.gate.rows for ffn in ffns), default=0)
    # In float32: the residual stream, its norms, a block's output and sum, and rows of experts; queries, keys and
    # values before and after their norms; what the router says. Then rounded activations of each of them.
    floats = 6 * hidden + 3 * query + 4 * kv + width + shape.expert_count
    records = rounded(hidden) + rounded(query) + rounded(width)
    choices = 8 * 8 * top_k  # ids, starts, order and shares, sent for each layer
    of_prefill = batch * (4 * floats + records + choices)
    of_a_block = 4 * floats + records + top_k * (4 * (width + hidden) + rounded(width)) + choices
    rope_tables = 4 * context * shape.rope_size
    return of_prefill + shape.block_count * of_a_block + rope_tables + 4 * vocabulary
