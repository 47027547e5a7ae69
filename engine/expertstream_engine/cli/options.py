"""The options that several commands share, each declared once, and how they become settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertstream_engine.cli.consoles import say

if TYPE_CHECKING:
    from expertstream_engine.settings import RunSettings

_MEMORY, _STREAMING, _OUTPUT = "Memory", "Streaming", "Output"


def path(text: str) -> Path:
    """The path that an option gives. An empty one, of a variable that a shell does not know, would be this folder."""
    if not text:
        raise typer.BadParameter("it is empty; give a path, or leave it out")
    return Path(text)


ModelArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        parser=path,
        show_default=False,
        help="A GGUF file, any shard of a split one, or the folder it lies in. [dim]By default the small bundled"
        " model.[/]",
    ),
]
ExpertMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=_MEMORY,
        help="Memory for routed experts: 8GiB (powers of 1024), 20GB (powers of 1000), 25% of all routed experts,"
        " or all. [dim]By default as much as is wise on this machine.[/]",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=_MEMORY,
        help="Pinned host memory that keeps experts below a device's slots, written as --expert-memory; 0 for none."
        " [dim]By default half of what the host has left, where the backend has such a tier.[/]",
    ),
]
HostTier = Annotated[
    str | None,
    typer.Option(
        metavar="inclusive|exclusive",
        rich_help_panel=_MEMORY,
        help="Whether host memory keeps what is read, or what leaves a slot. [dim]By default exclusive.[/]",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_MEMORY,
        help="Tokens of prompt and answer together. [dim]By default what the model was trained for, 4096 at most.[/]",
    ),
]
BackendName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,NAME...]",
        rich_help_panel=_STREAMING,
        help="Where slots live; `expertstream backends` lists them. Of several, the first usable one; the others are"
        " named with the reason. [dim]By default cpu.[/]",
    ),
]
BackendOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--backend-option",
        metavar="NAME.KEY=VALUE",
        rich_help_panel=_STREAMING,
        help="An option of a backend; may be given again. In a file: the table \\[backends.NAME]."
        " `expertstream backends` lists the options.",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_STREAMING,
        help="Which expert leaves when a slot is needed: hotness or lru. [dim]By default hotness.[/]",
    ),
]
HalfLifeTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_STREAMING,
        help="Tokens after which an expert's hotness counts half. [dim]By default 16.[/]",
    ),
]
IoMode = Annotated[
    str | None,
    typer.Option(
        metavar="auto|direct|buffered",
        rich_help_panel=_STREAMING,
        help="Read past the page cache, or through it. [dim]By default auto: direct where the file system can.[/]",
    ),
]
FillerThreads = Annotated[
    int | None,
    typer.Option(
        metavar="N", rich_help_panel=_STREAMING, help="Threads that read experts from the file. [dim]By default 8.[/]"
    ),
]
ReadTimeoutS = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_STREAMING,
        help="Seconds after which a read or a copy that has not ended is given up. [dim]By default 120.[/]",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", rich_help_panel=_STREAMING, help="Threads that compute. [dim]By default one a core.[/]"),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        parser=path,
        help='A TOML file of the options for memory and streaming: expert_memory = "8GiB".'
        " EXPERTSTREAM_* variables go before it, options before both. What to generate is said by options alone.",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", metavar="", rich_help_panel=_OUTPUT, help="Print one JSON document on stdout, nothing else."
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", metavar="", rich_help_panel=_OUTPUT, help="Log on stderr what was decided and allocated."
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", metavar="", rich_help_panel=_OUTPUT, help="Show the traceback of an error.")
]


def settings_from(config: Path | None, **options: object) -> RunSettings:
    """Settings from defaults, the file `config`, EXPERTSTREAM_* variables and the options that are not None."""
    from expertstream import load_settings
    from expertstream_engine.settings import COMMAND_LINE_ONLY, RunSettings

    return load_settings(
        RunSettings, file=config, environ=os.environ, overrides=options, options_only=COMMAND_LINE_ONLY
    )


def model_from(model: Path | None) -> Path:
    """The model given, or the bundled one, saying so."""
    from expertstream_engine.session import BUNDLED_MODEL

    if model is None:
        say("model: the bundled one of 15 million parameters, as none was given")
    return model or BUNDLED_MODEL
