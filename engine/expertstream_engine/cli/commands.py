"""The commands together, and the options that belong to none of them: one module a command beside this one.

Modules that take long to import are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from expertstream_engine.cli.backends import backends
from expertstream_engine.cli.inspect import inspect
from expertstream_engine.cli.plan import plan
from expertstream_engine.cli.run import run

__all__ = ["app"]

app = typer.Typer(
    name="expertstream",
    help="Run Mixture-of-Experts models larger than memory: experts stream from the GGUF file into slots.",
    epilog=(
        "Exit codes: 0 done; 2 wrong options, configuration or model, more memory than there is, or a device that"
        " failed; 1 storage or the program failed during the run; 130, 143 or 129 ended by Ctrl-C, SIGTERM or SIGHUP;"
        " 141 the reader of the output went away."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"expertstream {version('expertstream')}")
        raise typer.Exit


@app.callback()
def _options_of_all_commands(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...


for command, example in (
    (run, 'expertstream run model.gguf -p "Once upon a time" -n 64 --expert-memory 8GiB'),
    (inspect, "expertstream inspect model-00001-of-00003.gguf"),
    (plan, "expertstream plan model.gguf --expert-memory 25% --context 8192"),
    (backends, "expertstream backends --json"),
):
    app.command(epilog=f"Example: {example}")(command)
