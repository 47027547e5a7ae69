"""`expertstream run`: from options to a loaded model, its text on stdout and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertstream_engine.cli.consoles import counted, print_json, say, starting
from expertstream_engine.cli.errors import guarded
from expertstream_engine.cli.options import (
    AsJson,
    BackendName,
    BackendOptions,
    ConfigFile,
    Context,
    Debug,
    ExpertMemory,
    FillerThreads,
    HalfLifeTokens,
    HostMemory,
    HostTier,
    IoMode,
    ModelArgument,
    Policy,
    ReadTimeoutS,
    Threads,
    Verbose,
    model_from,
    path,
    settings_from,
)
from expertstream_engine.cli.prompt import read_prompt

if TYPE_CHECKING:
    from expertstream_engine.cli.screen import Screen
    from expertstream_engine.session import Generation

DEFAULT_MAX_TOKENS = 128

_GENERATION, _STREAMING = "Generation", "Streaming"


@guarded
def run(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            rich_help_panel=_GENERATION,
            help="The text to continue. Without it, standard input is read if it is not a terminal.",
        ),
    ] = None,
    token_ids: Annotated[
        str | None,
        typer.Option(metavar="1,2,3", rich_help_panel=_GENERATION, help="The prompt as token ids, taken as they are."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            metavar="N",
            rich_help_panel=_GENERATION,
            help="Tokens to generate at most. [dim]By default 128, or what the context leaves.[/]",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T",
            show_default=False,
            rich_help_panel=_GENERATION,
            help="How freely to draw. [dim]By default 0: always the most likely token.[/]",
        ),
    ] = 0.0,
    top_k: Annotated[
        int,
        typer.Option(
            metavar="N",
            show_default=False,
            rich_help_panel=_GENERATION,
            help="Draw from the N most likely. [dim]By default 0, which is off.[/]",
        ),
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            show_default=False,
            rich_help_panel=_GENERATION,
            help="Draw from the fewest that hold P of the probability. [dim]By default 1, which is off.[/]",
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            show_default=False,
            rich_help_panel=_GENERATION,
            help="Draw from those at least P times as likely as the best. [dim]By default 0, which is off.[/]",
        ),
    ] = 0.0,
    repeat_penalty: Annotated[
        float,
        typer.Option(
            metavar="R",
            show_default=False,
            rich_help_panel=_GENERATION,
            help="Make recent tokens less likely. [dim]By default 1, which is off.[/]",
        ),
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", rich_help_panel=_GENERATION, help="Repeat the draws of the run that told this seed."),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", metavar="", rich_help_panel=_GENERATION, help="Go on after an end-of-sequence token."
        ),
    ] = False,
    expert_memory: ExpertMemory = None,
    host_memory: HostMemory = None,
    host_tier: HostTier = None,
    context: Context = None,
    backend: BackendName = None,
    backend_option: BackendOptions = None,
    policy: Policy = None,
    half_life_tokens: HalfLifeTokens = None,
    io_mode: IoMode = None,
    filler_threads: FillerThreads = None,
    read_timeout_s: ReadTimeoutS = None,
    threads: Threads = None,
    hotlist: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path,
            rich_help_panel=_STREAMING,
            help="Begin with the experts that an earlier run saved as hot. [dim]By default those of the model's name"
            " with .hotlist.json after it (model.gguf.hotlist.json), if that lies beside the model; none leaves them"
            " out.[/]",
        ),
    ] = None,
    save_hotlist: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path,
            rich_help_panel=_STREAMING,
            help="Save which experts were hot, for a later run. [dim]Only a hotlist or an empty file is replaced.[/]",
        ),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Generate text: it appears as it is computed, with a live status, and a report at the end."""
    with starting():
        settings = settings_from(
            config,
            backend=backend,
            backends=backend_option,
            expert_memory=expert_memory,
            host_memory=host_memory,
            host_tier=host_tier,
            policy=policy,
            context=context,
            threads=threads,
            io_mode=io_mode,
            filler_threads=filler_threads,
            read_timeout_s=read_timeout_s,
            half_life_tokens=half_life_tokens,
            hotlist=hotlist,
        )
        from expertstream import ExpertstreamError, hotlist_beside, refuse_unwritable
        from expertstream_engine.cli.screen import Screen
        from expertstream_engine.cli.summary import print_report
        from expertstream_engine.demand import plan_run
        from expertstream_engine.prompts import Prompts
        from expertstream_engine.sampling import SamplingSettings
        from expertstream_engine.session import Model

        if save_hotlist is not None:
            refuse_unwritable(save_hotlist)
        sampling = SamplingSettings(temperature, top_k, top_p, min_p, repeat_penalty, seed=seed)
        planned = plan_run(model_from(model), settings)
        prompts = Prompts(planned.checkpoint, planned.shape, planned.plan.demand.context_tokens)
    text, tokens = read_prompt(prompts, prompt, token_ids, bundled=model is None)
    wanted = _max_tokens(max_tokens, len(tokens), prompts.context_tokens)
    prompts.check(tokens, wanted)
    if prompts.tokenizer is None:
        say(f"note: token ids are printed instead of text: {prompts.no_tokenizer_because}")
    for note in planned.plan.notes:
        say(f"note: {note}")
    if planned.hotlist is not None and settings.hotlist is None:
        say(f"note: begins with the experts of {hotlist_beside(planned.checkpoint)}; --hotlist none leaves them out")
    if not temperature and (unused := sampling.draw_options()):
        names = " and ".join(f"--{name.replace('_', '-')}" for name in unused)
        changes = "changes" if len(unused) == 1 else "change"
        say(f"note: {names} {changes} nothing at temperature 0, which takes the most likely token")

    def report(generation: Generation) -> None:
        if as_json:
            print_json(generation.report.to_json())
        else:
            print_report(generation.report)

    def save() -> None:
        if save_hotlist is not None and generation is not None and generation.tokens:
            loaded.save_hotlist(save_hotlist)

    generation: Generation | None = None
    with ExitStack() as opened, _afterwards(save):
        try:
            with Screen(shows_text=not as_json) as screen:
                loaded = opened.enter_context(Model(planned, settings, screen.progress, prompts))
                screen.echo(text)
                generation = loaded.generate(tokens, wanted, sampling, ignore_eos=ignore_eos)
                _show(generation, screen, wanted, as_text=prompts.tokenizer is not None)
        except (KeyboardInterrupt, ExpertstreamError):
            if generation is not None:
                report(generation)
            raise
        report(generation)


@contextmanager
def _afterwards(save: Callable[[], None]) -> Iterator[None]:
    """Save after the block, however it ends. A failure to save is only said where another error is under way."""
    from expertstream import ConfigError, MachineError

    try:
        yield
    except BaseException:
        try:
            save()
        except (ConfigError, MachineError) as error:
            say(f"error: {error}")
        raise
    save()


def _show(generation: Generation, screen: Screen, max_tokens: int, *, as_text: bool) -> None:
    """Run the generation to its end, piece by piece onto the screen."""
    from expertstream_engine.cli.summary import prompt_line, status_line

    screen.status(lambda: prompt_line(generation.report, generation.prefill_steps))
    for piece in generation:
        if len(generation.tokens) == 1:
            screen.end_telling()
            screen.status(lambda: status_line(generation.report, max_tokens))
        screen.text(piece if as_text else f"{generation.tokens[-1]} ")


def _max_tokens(asked: int | None, prompt_length: int, context_tokens: int) -> int:
    """How many tokens to generate; only the default gives way to the context."""
    if asked is not None:
        return asked
    left = context_tokens - prompt_length
    if left < 1:
        return 1  # to be refused
    if left < DEFAULT_MAX_TOKENS:
        say(f"note: at most {counted(left, 'token')} will be generated: the context of {context_tokens} holds no more")
    return min(left, DEFAULT_MAX_TOKENS)
