"""Open a model, generate from it, close it: the Python API.

It owns the order in which things come up and go down; each of them knows its own business.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from expertstream import (
    ConfigError,
    Counters,
    ExpertStreamer,
    ExpertstreamError,
    UsageError,
    get_log,
    hotlist_of,
    load_resident,
    load_settings,
    prepare_step,
    write_hotlist,
)
from expertstream_engine.demand import LARGEST_BATCH_TOKENS, PlannedRun, plan_run
from expertstream_engine.model import MoeModel
from expertstream_engine.ops import address_of, check_view, ops_for
from expertstream_engine.ops.protocol import F32, I64
from expertstream_engine.prompts import Prompts
from expertstream_engine.report import DeviceMemory, GenerationReport, peak_rss_bytes, rss_bytes
from expertstream_engine.sampling import LogitsNotFinite, Sampler, SamplingSettings
from expertstream_engine.settings import RunSettings
from expertstream_engine.tokenizer import Tokenizer
from expertstream_engine.weights import assemble_weights, kernel_shapes, weight_types

BUNDLED_MODEL = Path(__file__).parent / "models" / "tiny15m-q4_k_m.gguf"
"""A real model of 15 million parameters that comes with the package; models/README.md says how it was made."""

_LOOK_EVERY_S = 0.05

Progress = Callable[[str, int, int], None]
"""Called with what is being done and how far it is: "kernel NAME", which begins to be compiled or to be taken from the
cache (0 of 0), then "slots", "weights" and "hot experts", bytes of all bytes. Once there are slots, each is preceded by
"host tier", where there is one: pinned bytes of those planned, which grow beside all of it and may go on after."""


def open_model(path: str | os.PathLike[str] | None = None, *, config: Path | None = None, **options: Any) -> Model:
    """A model ready to generate; use it in a `with` statement or close it.

    `path` is a GGUF file, any shard of a split one or their folder; None is the bundled model. `options` are the
    fields of RunSettings, with sizes as text or MemoryRequest, over EXPERTSTREAM_* variables, over the file `config`.
    Raises what `plan_run` raises, ConfigError for options and an empty path, and ReadFailed.
    """
    model = BUNDLED_MODEL if path is None else Path(os.fsdecode(path))
    if path is not None and not os.fspath(path):
        raise ConfigError("the model's path is empty; give one, or None for the bundled model")
    settings = load_settings(RunSettings, file=config, environ=os.environ, overrides=options)
    return Model(plan_run(model, settings), settings)


class Model:
    """A loaded model: resident weights, slots, worker threads. One generation at a time, from one thread."""

    def __init__(
        self,
        planned: PlannedRun,
        settings: RunSettings,
        progress: Progress = lambda what, done, total: None,
        prompts: Prompts | None = None,
    ) -> None:
        """Load what was planned. Compiles the kernels that the file needs, or takes them from the cache.

        `prompts` are of the same plan, for a caller who has checked a prompt before loading. Raises
        BackendContractError, before weights are loaded, where slots are not in the memory that they were planned for.
        """
        self.planned = planned
        self.settings = settings
        self.interpreter_bytes = rss_bytes()
        checkpoint, shape = planned.checkpoint, planned.shape
        self._prompts = prompts or Prompts(checkpoint, shape, planned.plan.demand.context_tokens)
        self.seeded_experts = 0
        with ExitStack() as opened:
            progress("kernel layer step", 0, 0)
            prepare_step(settings.policy)
            progress("slots", 0, planned.plan.expert_memory_bytes)
            self.streamer = opened.enter_context(
                ExpertStreamer(
                    checkpoint,
                    planned.plan,
                    planned.backend,
                    policy=settings.policy,
                    half_life_tokens=settings.half_life_tokens,
                    io_mode=settings.io_mode,
                    filler_threads=settings.filler_threads,
                    read_timeout_s=settings.read_timeout_s,
                )
            )

            def beside_tier(what: str, done: int, total: int) -> None:
                self._tell_tier(progress)
                progress(what, done, total)

            slot_addresses = self._slot_addresses()
            # In one pool weights are still there while they are placed, and would all be in memory twice.
            reserved_bytes = 0 if planned.plan.one_pool else planned.plan.demand.total_bytes
            ops = ops_for(self.streamer.device_view(0), settings.threads, reserved_bytes)
            shapes = kernel_shapes(checkpoint, shape)
            ops.prepare(weight_types(checkpoint), lambda name: beside_tier(f"kernel {name}", 0, 0), shapes)
            # What the streamer has found out, and said, about direct reads is not to be tried and said again.
            io_mode = "buffered" if self.streamer.io_mode == "buffered" else settings.io_mode
            resident = load_resident(
                checkpoint,
                io_mode,
                lambda done, total: beside_tier("weights", done, total),
                thread_count=settings.filler_threads,
                read_timeout_s=settings.read_timeout_s,
            )
            beside_tier("kernel threads", 0, 0)
            opened.enter_context(ops)
            weights = assemble_weights(checkpoint, shape, resident, self.streamer.part_positions, ops.place)
            if planned.hotlist is not None:
                self.seeded_experts = self.streamer.seed(
                    planned.hotlist.scores, lambda done, total: beside_tier("hot experts", done, total)
                )
            self._ops = ops
            context = planned.plan.demand.context_tokens
            self._decoder = MoeModel(shape, weights, ops, self.streamer, slot_addresses, context)
            self._memory = DeviceMemory(0, 0)
            self._memory = self._measured()
            self._io_mode = self.streamer.io_mode
            self._generating = False
            self._closed = False
            self._in_use = threading.RLock()
            self._opened = opened.pop_all()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None where this version does not know it."""
        return self._prompts.tokenizer

    @property
    def context_tokens(self) -> int:
        """How many positions the KV cache holds."""
        return self._decoder.context_tokens

    def wait_for_host_tier(self, progress: Progress = lambda what, done, total: None) -> None:
        """Block until the host tier is as large as it gets; it is used before, as far as it has grown."""
        while (tier := self.streamer.host_tier) is not None and tier.is_growing:
            self._tell_tier(progress)
            time.sleep(_LOOK_EVERY_S)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with BOS where the file says so. Raises ConfigError without a tokenizer."""
        return self._prompts.encode(text)

    def logits(self, tokens: Sequence[int], *, all_positions: bool = False) -> F32:
        """Logits after a fresh prompt of token ids: (1, vocabulary) of the last position, or a row for each.

        Of damaged weights they may be NaN, which `generate` refuses.
        """
        self._begin()
        try:
            self._decoder.reset()
            self._prompts.check_ids(tokens)
            ids = np.array(tokens, np.int64)
            batches = [
                self._forward(ids[at : at + LARGEST_BATCH_TOKENS], all_logits=all_positions)
                for at in range(0, ids.size, LARGEST_BATCH_TOKENS)
            ]
            return np.concatenate(batches) if all_positions and len(batches) > 1 else batches[-1]
        finally:
            self._generating = False

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        sampling: SamplingSettings | None = None,
        *,
        ignore_eos: bool = False,
    ) -> Generation:
        """Text pieces as they come, and afterwards what they cost; see Generation. Each prompt begins a new sequence.

        Token ids are taken as they are; text gets BOS where the file says so. Raises ContextOverflow, before anything
        is computed, if prompt and answer do not fit the context; a pass raises what reads and the backend raise, and
        LogitsNotFinite where weights are damaged.
        """
        ids = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        self._prompts.check(ids, max_tokens)
        return Generation(self, ids, max_tokens, sampling or SamplingSettings(), ignore_eos)

    def save_hotlist(self, path: str | os.PathLike[str]) -> int:
        """Write the experts used so far, hottest first, in place of the hotlist that `path` holds; how many they are.

        A later run is seeded from that file. Raises ConfigError where `path` is something else than a hotlist, an empty
        file or a new name in a folder that can be written to, and MachineError where writing fails.
        """
        hottest = self.streamer.hottest()
        write_hotlist(Path(path), hotlist_of(self.planned.checkpoint, hottest))
        return len(hottest)

    @property
    def device_memory(self) -> DeviceMemory:
        """What the model has on a device and of pinned host memory.

        As it was last, where the model is closed or another thread is in a pass. Never blocks.
        """
        if self._in_use.acquire(blocking=False):
            try:
                if not self._closed:
                    self._memory = self._measured()
            finally:
                self._in_use.release()
        return self._memory

    def close(self) -> None:
        """End all threads and free the memory, once no thread is in a pass. A second call does nothing."""
        with self._in_use:
            is_first, self._closed = not self._closed, True
            try:
                if is_first:
                    self._memory = self._measured()
            finally:
                self._opened.close()
                if not is_first:
                    self.streamer.close()  # ends what an interrupt left of the call before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ExpertstreamError as failure:
            if error is None:
                raise
            get_log().warning("close_failed", error=str(failure))  # where a device has failed, closing it often does

    def _forward(self, ids: I64, *, all_logits: bool = False) -> F32:
        """A pass during which the memory that it reads stays."""
        with self._in_use:
            if self._closed:
                raise UsageError("this model was closed while it was generating")
            logits = self._decoder.forward(ids, all_logits=all_logits)
            self._io_mode = self.streamer.io_mode  # a file system may turn direct reads down at any of them
            return logits

    def _slot_addresses(self) -> I64:
        """Where each slot begins for kernels; no view stays, as one would keep slots of a model that failed to load."""
        addresses = np.empty(self.streamer.slot_count, np.int64)
        for slot in range(addresses.size):
            view = self.streamer.device_view(slot)
            check_view(self.planned.backend, self.planned.dlpack_type, slot, view)
            addresses[slot] = address_of(view)
        return addresses

    def _measured(self) -> DeviceMemory:
        """What there is now, or was last where the backend cannot say: a figure for people ends no run."""
        try:
            stores = self.streamer.memory
        except ExpertstreamError as error:
            get_log().warning("memory_not_measured", error=str(error))
            return self._memory
        device_bytes = 0 if self.planned.plan.one_pool else stores.slot_bytes + self._ops.held_bytes
        return DeviceMemory(device_bytes, stores.pinned_bytes)

    def _tell_tier(self, progress: Progress) -> None:
        tier = self.streamer.host_tier
        if tier is not None:
            progress("host tier", tier.pinned_bytes, self.planned.plan.host_memory_bytes)

    def _begin(self) -> None:
        if self._closed:
            raise UsageError("this model is closed")
        if self._generating:
            raise UsageError("this model is generating; exhaust or close that generation before the next one")
        self._generating = True


class Generation:
    """An iterator over pieces of text (empty while a character is incomplete, or without a tokenizer).

    `tokens` grows with it; `report` tells the cost so far. Ends at an end-of-sequence token, which is the last of
    `tokens` and has no text, or after `max_tokens`. Close it, exhaust it or let go of it before the model's next one.
    """

    def __init__(
        self, model: Model, prompt: list[int], max_tokens: int, sampling: SamplingSettings, ignore_eos: bool
    ) -> None:
        self._model = model
        self._progress = _Progress(model, prompt, Sampler(sampling))
        # It must not know this object: then letting go of this one is enough to end it.
        self._pieces = _pieces(model, self._progress, max_tokens, ignore_eos)

    @property
    def prompt_tokens(self) -> list[int]:
        """The token ids of the prompt, BOS included where there is one."""
        return self._progress.prompt_tokens

    @property
    def tokens(self) -> list[int]:
        """The token ids generated so far."""
        return self._progress.tokens

    @property
    def text(self) -> str:
        """The pieces so far, one after the other."""
        return self._progress.text

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = next(self._pieces)
        self._progress.text += piece
        return piece

    def close(self) -> None:
        """End the generation where it is."""
        self._pieces.close()

    @property
    def report(self) -> GenerationReport:
        """The figures up to now; also after the model is closed, and from any thread."""
        model, progress = self._model, self._progress
        plan = model.planned.plan
        prefill, prefill_seconds = progress.prefill.so_far()
        decode, decode_seconds = progress.decode.so_far()
        tier, memory = model.streamer.host_tier, model.device_memory
        return GenerationReport(
            prompt_tokens=tuple(progress.prompt_tokens),
            tokens=tuple(progress.tokens),
            text=progress.text if model.tokenizer is not None else None,
            finish=progress.finish,
            backend=model.planned.backend.name,
            policy=model.settings.policy,
            io_mode=progress.io_mode,
            slots=model.streamer.slot_count,
            expert_count=sum(layer.expert_count for layer in model.planned.checkpoint.layers),
            routed_bytes=plan.routed_bytes,
            expert_memory_bytes=plan.expert_memory_bytes,
            resident_bytes=plan.demand.resident_bytes,
            host_slots=tier.slot_count if tier is not None else 0,
            planned_host_slots=tier.planned_slots if tier is not None else 0,
            host_tier_growing=tier is not None and tier.is_growing,
            host_tiering=plan.host_tiering if tier is not None else None,
            on_device=plan.demand.on_device or not plan.one_pool,
            device_bytes=memory.device_bytes,
            pinned_bytes=memory.pinned_bytes,
            seeded_experts=model.seeded_experts,
            prefill=prefill,
            decode=decode,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            decode_passes=progress.decode_passes,
            planned_bytes=plan.host_bytes,
            planned_device_bytes=plan.device_bytes,
            interpreter_bytes=model.interpreter_bytes,
            peak_rss_bytes=peak_rss_bytes(),
            seed=progress.sampler.seed if progress.sampler.draws else None,
        )

    @property
    def prefill_steps(self) -> int:
        """How many layer steps the prompt takes; `report.prefill.steps` of them are done or under way."""
        batches = -(-len(self.prompt_tokens) // LARGEST_BATCH_TOKENS)
        return batches * len(self._model.planned.checkpoint.layers)


class _Progress:
    """How far a generation is. Its generator writes it, and `Generation` shows it."""

    def __init__(self, model: Model, prompt_tokens: list[int], sampler: Sampler) -> None:
        self.prompt_tokens = prompt_tokens
        self.sampler = sampler
        self.tokens: list[int] = []
        self.text = ""
        self.finish = "interrupted"
        self.io_mode = model._io_mode
        self.prefill = _Cost(model.streamer)
        self.decode = _Cost(model.streamer)
        self.decode_passes = 0


def _pieces(model: Model, progress: _Progress, max_tokens: int, ignore_eos: bool) -> Generator[str, None, None]:
    model._begin()
    try:
        tokenizer = model.tokenizer
        stops: frozenset[int] = frozenset()
        if tokenizer is not None and not ignore_eos:
            stops = tokenizer.eos_ids
        stream = tokenizer.stream(continues=True) if tokenizer is not None else None
        recent = list(progress.prompt_tokens)

        def chosen(logits: F32) -> str | None:
            """The piece of the next token, None for the end."""
            try:
                token = progress.sampler.next(logits[0], recent)
            except LogitsNotFinite as error:
                first, *others = model.planned.checkpoint.files
                files = f"{first} and {len(others)} more files" if others else first
                error.add_note(
                    f"after {len(recent)} tokens with the weights of {files}: they are damaged, or give numbers that"
                    " are too large for their type; compare checksums with the publisher's"
                )
                raise
            recent.append(token)
            progress.tokens.append(token)
            progress.io_mode = model._io_mode
            if token in stops:
                progress.finish = "eos"
                return None
            if len(progress.tokens) == max_tokens:
                progress.finish = "length"
            return stream.push(token) if stream is not None else ""

        model._decoder.reset()
        with progress.prefill:
            ids = np.array(progress.prompt_tokens, np.int64)
            for at in range(0, ids.size, LARGEST_BATCH_TOKENS):
                logits = model._forward(ids[at : at + LARGEST_BATCH_TOKENS])
            piece = chosen(logits)
        while piece is not None:
            yield piece
            if progress.finish == "length":
                break
            with progress.decode:
                logits = model._forward(np.array(progress.tokens[-1:], np.int64))
                progress.decode_passes += 1
                piece = chosen(logits)
        if stream is not None and (rest := stream.finish()):
            yield rest
    except ExpertstreamError:
        progress.finish = "failed"
        raise
    finally:
        model._generating = False


class _Cost:
    """What a phase costs: the streamer's counters and seconds, summed over the times that its `with` block runs."""

    def __init__(self, streamer: ExpertStreamer) -> None:
        self._streamer = streamer
        # One tuple, replaced whole: counters and seconds of ended blocks, and where those of one under way began.
        self._sum: tuple[Counters, float, tuple[Counters, float] | None] = Counters(), 0.0, None

    def so_far(self) -> tuple[Counters, float]:
        """Counters and seconds up to now; from any thread."""
        counters, seconds, began = self._sum
        if began is None:
            return counters, seconds
        return counters + (self._streamer.counters - began[0]), seconds + time.perf_counter() - began[1]

    def __enter__(self) -> None:
        self._sum = *self._sum[:2], (self._streamer.counters, time.perf_counter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sum = *self.so_far(), None
