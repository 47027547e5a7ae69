"""What a run takes besides slots, so that `plan` and the loader decide on the same numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from attrs import frozen

from expertstream import (
    AvailableMemory,
    Backend,
    Checkpoint,
    ConfigError,
    Demand,
    Hotlist,
    LogHooks,
    Plan,
    available_memory,
    choose_hotlist,
    get_log,
    make_plan,
    open_backend,
    open_checkpoint,
    resident_padding_bytes,
    usable_cores,
)
from expertstream.filler.files import SourceFile
from expertstream.policies import make_policy
from expertstream.streamer import LOOKAHEAD
from expertstream_engine.architecture import ModelShape, read_shape
from expertstream_engine.kernels.registry import SUPPORTED_TYPES
from expertstream_engine.ops import computes_on_device
from expertstream_engine.ops.checks import check_types
from expertstream_engine.ops.device_workspace import device_workspace_bytes
from expertstream_engine.ops.numba_ops import workspace_bytes
from expertstream_engine.ops.protocol import ExpertFfn
from expertstream_engine.settings import DEFAULT_CONTEXT_TOKENS, RunSettings
from expertstream_engine.weights import check_tensors, expert_ffn, weight_types

LARGEST_BATCH_TOKENS = 2048
"""A longer prompt goes through in batches of this many tokens: it bounds the workspace, and each batch reads an
expert at most once."""


@frozen(eq=False)
class PlannedRun:
    """A model that was found fit to run on a backend, with the memory it will take. Nothing is allocated yet.

    It was planned for slots in memory of `dlpack_type`, as the backend described itself.
    """

    checkpoint: Checkpoint
    shape: ModelShape
    backend: Backend
    dlpack_type: int
    plan: Plan
    hotlist: Hotlist | None


def plan_run(
    model: Path, settings: RunSettings, available: AvailableMemory | None = None, observers: Sequence[object] = ()
) -> PlannedRun:
    """Index the model, open the backend and plan the memory; all that can be refused is refused here.

    Raises CheckpointError, UnsupportedCheckpoint, BackendUnavailable, MachineError for direct reads that are asked for
    and refused, and ConfigError: BackendNotFound, BudgetTooSmall, DoesNotFit, a policy, a context, a host tier or a
    hotlist that cannot be.
    """
    backend = open_backend(settings.backend, (LogHooks(), *observers), settings.backends)
    make_policy(settings.policy, 1, settings.half_life_tokens)  # refuses an unknown name; the streamer makes its own
    checkpoint = open_checkpoint(model)
    shape = check_runnable(checkpoint)
    if settings.io_mode == "direct":
        for file in checkpoint.files:  # it refuses them; the streamer opens its own
            SourceFile(file, "direct", read_timeout_s=settings.read_timeout_s).close()
    hotlist = choose_hotlist(checkpoint, settings.hotlist)
    dlpack_type = backend.describe_device().dlpack_type
    on_device = computes_on_device(backend, dlpack_type)
    if on_device and settings.threads is not None:
        get_log().warning("threads_not_used", threads=settings.threads, reason="a device computes, not the CPU")
    context = context_tokens(shape, settings)
    demand = run_demand(checkpoint, shape, context, None if on_device else settings.threads or usable_cores())
    plan = make_plan(
        checkpoint,
        demand,
        settings.expert_memory,
        backend,
        available or available_memory(),
        host_request=settings.host_memory,
        host_tiering=settings.host_tier,
    )
    return PlannedRun(checkpoint, shape, backend, dlpack_type, plan, hotlist)


def check_runnable(checkpoint: Checkpoint) -> ModelShape:
    """The shape of a model that this version can compute. Reads no tensor's bytes.

    Raises UnsupportedCheckpoint for an architecture, a tensor or a type of weights that it cannot.
    """
    shape = read_shape(checkpoint)
    check_tensors(checkpoint, shape)
    check_types(weight_types(checkpoint), SUPPORTED_TYPES)
    return shape


def context_tokens(shape: ModelShape, settings: RunSettings) -> int:
    """The context asked for, or the default. Raises ConfigError above what the model was trained for."""
    if settings.context is None:
        return min(shape.trained_context, DEFAULT_CONTEXT_TOKENS)
    if settings.context > shape.trained_context:
        raise ConfigError(
            f"a context of {settings.context} tokens was asked for; the model was trained for {shape.trained_context}"
        )
    return settings.context


def run_demand(checkpoint: Checkpoint, shape: ModelShape, context: int, threads: int | None) -> Demand:
    """The bytes of weights, KV cache and workspace for that context, of a CPU with `threads` or, None, of a device."""
    batch = min(context, LARGEST_BATCH_TOKENS)
    vocabulary = checkpoint.tensors["token_embd.weight"].shape[0]
    ffns = {expert_ffn(layer, checkpoint, shape) for layer in checkpoint.layers}
    if threads is None:
        types = weight_types(checkpoint)
        workspace = device_workspace_bytes(shape, batch, context, vocabulary, types, ffns)
        # While weights are placed, one of them is in memory twice; KV cache and workspace come after that.
        largest_bytes = max(tensor.nbytes for tensor in checkpoint.tensors.values())
        workspace = max(workspace, largest_bytes - context * shape.kv_bytes_per_token)
    else:
        workspace = (
            4 * (batch * _held_floats(shape) + context * shape.rope_size + 4 * vocabulary)
            + _scratch_bytes(checkpoint, shape, batch, threads, ffns)
            + resident_padding_bytes(checkpoint)
        )
    return Demand(
        resident_bytes=checkpoint.resident_bytes,
        kv_cache_bytes=context * shape.kv_bytes_per_token,
        workspace_bytes=workspace,
        context_tokens=context,
        on_device=threads is None,
    )


def _held_floats(shape: ModelShape) -> int:
    """What MoeModel holds at once, in float32 a token.

    The residual stream, its norm, a block's output and the rows of one expert; queries, keys and values before and
    after their norms; router logits, ids, shares and their order.
    """
    query, kv = shape.head_count * shape.head_size, shape.kv_head_count * shape.head_size
    return 5 * shape.hidden_size + 3 * query + 4 * kv + shape.expert_count + 10 * shape.experts_per_token


def _scratch_bytes(
    checkpoint: Checkpoint, shape: ModelShape, batch: int, threads: int, ffns: Collection[ExpertFfn]
) -> int:
    """What the kernels hold: the larger of a prefill's need, in runs of experts, and a decode's."""
    # Matrices of the same columns may share a call, which then rounds its activations for all their types.
    types: dict[int, set[str]] = {}
    for tensor in checkpoint.tensors.values():
        if len(tensor.shape) == 2:
            types.setdefault(tensor.shape[1], set()).add(tensor.type_name)
    return max(
        workspace_bytes(
            threads,
            tokens,
            matmuls=types.items(),
            ffns=ffns,
            experts=experts,
            top_k=rows_of_a_token,
            heads=shape.head_count,
            kv_heads=shape.kv_head_count,
            head_size=shape.head_size,
        )
        for tokens, experts, rows_of_a_token in (
            (batch, min(LOOKAHEAD, shape.expert_count), 1),
            (1, shape.experts_per_token, shape.experts_per_token),
        )
    )
