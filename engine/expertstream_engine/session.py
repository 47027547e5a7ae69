"""Open a model, generate from it, close it: the Python API.

It owns the order in which things come up and go down; each of them knows its own business.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from expertstream import (
    Counters,
    ExpertStreamer,
    UsageError,
    load_resident,
    load_settings,
    prepare_step,
)
from expertstream_engine.demand import LARGEST_BATCH_TOKENS, PlannedRun, plan_run
from expertstream_engine.model import MoeModel
from expertstream_engine.ops.numba_ops import NumbaOps
from expertstream_engine.ops.protocol import F32
from expertstream_engine.prompts import Prompts
from expertstream_engine.report import GenerationReport, peak_rss_bytes
from expertstream_engine.sampling import Sampler, SamplingSettings
from expertstream_engine.settings import RunSettings, usable_cores
from expertstream_engine.tokenizer import Tokenizer
from expertstream_engine.weights import assemble_weights, weight_types

BUNDLED_MODEL = Path(__file__).parent / "models" / "tiny15m-q4_k_m.gguf"
"""A real model of 15 million parameters that comes with the package; models/README.md says how it was made."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done and how far it is: "kernel NAME", whose compilation begins (0 of 0), then "slots" and
"weights", bytes of all bytes."""


def open_model(path: str | os.PathLike[str] | None = None, *, config: Path | None = None, **options: Any) -> Model:
    """A model ready to generate; use it in a `with` statement or close it.

    `path` is a GGUF file, any shard of a split one or their folder; None is the bundled model. `options` are the
    fields of RunSettings, with sizes as text or MemoryRequest, over EXPERTSTREAM_* variables, over the file `config`.
    Raises what `plan_run` raises, ConfigError for options, and ReadFailed.
    """
    settings = load_settings(RunSettings, file=config, environ=os.environ, overrides=options)
    return Model(plan_run(Path(path) if path is not None else BUNDLED_MODEL, settings), settings)


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

        `prompts` are of the same plan, for a caller who has checked a prompt before loading.
        """
        self.planned = planned
        self.settings = settings
        checkpoint, shape = planned.checkpoint, planned.shape
        self._prompts = prompts or Prompts(checkpoint, planned.plan.demand.context_tokens)
        with ExitStack() as opened:
            ops = NumbaOps(settings.threads or usable_cores())
            types = weight_types(checkpoint)
            ops.prepare(types, lambda name: progress(f"kernel {name}", 0, 0))
            progress("kernel layer step", 0, 0)
            prepare_step(settings.policy)
            progress("slots", 0, planned.plan.expert_memory_bytes)
            self.streamer = opened.enter_context(ExpertStreamer(checkpoint, planned.plan, planned.backend, settings))
            resident = load_resident(checkpoint, settings.io_mode, lambda done, total: progress("weights", done, total))
            weights = assemble_weights(checkpoint, shape, resident, self.streamer.part_positions)
            progress("kernel threads", 0, 0)
            opened.enter_context(ops)
            self._decoder = MoeModel(shape, weights, ops, self.streamer, planned.plan.demand.context_tokens)
            self._opened = opened.pop_all()
        self._generating = False
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None where this version does not know it."""
        return self._prompts.tokenizer

    @property
    def context_tokens(self) -> int:
        """How many positions the KV cache holds."""
        return self._decoder.context_tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with BOS where the file says so. Raises ConfigError without a tokenizer."""
        return self._prompts.encode(text)

    def logits(self, tokens: Sequence[int], *, all_positions: bool = False) -> F32:
        """Logits after a fresh prompt of token ids: (1, vocabulary) of the last position, or a row for each."""
        self._begin()
        try:
            self._decoder.reset()
            self._prompts.check_ids(tokens)
            ids = np.array(tokens, np.int64)
            batches = [
                self._decoder.forward(ids[at : at + LARGEST_BATCH_TOKENS], all_logits=all_positions)
                for at in range(0, ids.size, LARGEST_BATCH_TOKENS)
            ]
            return np.concatenate(batches) if all_positions else batches[-1]
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
        is computed, if prompt and answer do not fit the context.
        """
        ids = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        self._prompts.check(ids, max_tokens)
        return Generation(self, ids, max_tokens, sampling or SamplingSettings(), ignore_eos)

    def close(self) -> None:
        """End all threads and free the memory. A second call does nothing."""
        self._closed = True
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        if self._closed:
            raise UsageError("this model is closed")
        if self._generating:
            raise UsageError("this model is generating; exhaust or close that generation before the next one")
        self._generating = True


class Generation:
    """An iterator over pieces of text (empty while a character is incomplete, or without a tokenizer).

    `tokens` grows with it; `report` tells the cost so far. Ends at an end-of-sequence token, which is the last of
    `tokens` and has no text, or after `max_tokens`. Close it, or exhaust it, before the model's next generation.
    """

    def __init__(
        self, model: Model, prompt: list[int], max_tokens: int, sampling: SamplingSettings, ignore_eos: bool
    ) -> None:
        self.prompt_tokens = prompt
        self.tokens: list[int] = []
        self.text = ""
        self._model = model
        self._sampler = Sampler(sampling)
        self._finish = "interrupted"
        self._io_mode = model.streamer.io_mode
        self._prefill = self._decode = Counters()
        self._prefill_seconds = self._decode_seconds = 0.0
        self._decode_passes = 0
        self._pieces = self._run(max_tokens, ignore_eos)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = next(self._pieces)
        self.text += piece
        return piece

    def close(self) -> None:
        """End the generation where it is."""
        self._pieces.close()

    @property
    def report(self) -> GenerationReport:
        """The figures up to now; also after the model is closed, and from any thread."""
        model = self._model
        plan = model.planned.plan
        return GenerationReport(
            prompt_tokens=tuple(self.prompt_tokens),
            tokens=tuple(self.tokens),
            text=self.text if model.tokenizer is not None else None,
            finish=self._finish,
            backend=model.planned.backend.name,
            policy=model.settings.policy,
            io_mode=self._io_mode,
            slots=model.streamer.slot_count,
            expert_count=sum(layer.expert_count for layer in model.planned.checkpoint.layers),
            expert_memory_bytes=plan.expert_memory_bytes,
            resident_bytes=plan.demand.resident_bytes,
            prefill=self._prefill,
            decode=self._decode,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            decode_passes=self._decode_passes,
            peak_rss_bytes=peak_rss_bytes(),
            seed=self._sampler.seed,
        )

    def _run(self, max_tokens: int, ignore_eos: bool) -> Generator[str, None, None]:
        model, streamer = self._model, self._model.streamer
        model._begin()
        try:
            stops: frozenset[int] = frozenset()
            if model.tokenizer is not None and not ignore_eos:
                stops = model.tokenizer.eos_ids
            stream = model.tokenizer.stream(continues=True) if model.tokenizer is not None else None
            decoder = model._decoder
            decoder.reset()
            before, began = streamer.counters, time.perf_counter()
            ids = np.array(self.prompt_tokens, np.int64)
            for at in range(0, ids.size, LARGEST_BATCH_TOKENS):
                logits = decoder.forward(ids[at : at + LARGEST_BATCH_TOKENS])
            self._prefill = streamer.counters - before
            self._prefill_seconds = time.perf_counter() - began
            before = streamer.counters
            while True:
                token = self._sampler.next(logits[0], [*self.prompt_tokens, *self.tokens])
                self.tokens.append(token)
                if token in stops:
                    self._finish = "eos"
                    break
                if len(self.tokens) == max_tokens:
                    self._finish = "length"
                if stream is not None:
                    yield stream.push(token)
                else:
                    yield ""
                if self._finish == "length":
                    break
                began = time.perf_counter()
                logits = decoder.forward(np.array([token], np.int64))
                self._decode_seconds += time.perf_counter() - began
                self._decode_passes += 1
                self._decode = streamer.counters - before
                self._io_mode = streamer.io_mode  # a file system may turn direct reads down later
            if stream is not None and (rest := stream.finish()):
                yield rest
        finally:
            model._generating = False
