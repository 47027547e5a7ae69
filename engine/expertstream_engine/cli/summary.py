"""What a generation cost, in words: the line while it lasts and the report at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from expertstream_engine.cli.consoles import console, say, size_text

if TYPE_CHECKING:
    from expertstream_engine.report import GenerationReport


def status_line(report: GenerationReport, max_tokens: int) -> str:
    """Where a generation stands: speed, hit rate and bytes per token of the decode so far."""
    parts = [f"{len(report.tokens)}/{max_tokens} tokens"]
    if speed := report.decode_tokens_per_second:
        parts.append(f"{speed:.1f} tokens/s")
        parts.append(f"hit rate {_percent(report.decode.hit_rate)}")
        parts.append(f"{size_text(report.decode.expert_bytes_read // report.decode_passes)} per token")
    return ", ".join(parts)


def print_report(report: GenerationReport, *, sampled: bool) -> None:
    """Print the figures on stderr, prefill and decode apart, and whether streaming was really on.

    With `sampled` it tells the seed that repeats the run.
    """
    table = Table("", "tokens", "seconds", "tokens/s", "hit rate", "experts read per token", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for phase, counters, tokens, seconds in (
        ("prefill", report.prefill, len(report.prompt_tokens), report.prefill_seconds),
        ("decode", report.decode, report.decode_passes, report.decode_seconds),
    ):
        table.add_row(
            phase,
            str(tokens),
            f"{seconds:.2f}",
            f"{tokens / seconds:.1f}" if seconds else "-",
            _percent(counters.hit_rate),
            size_text(counters.expert_bytes_read // tokens) if tokens else "-",
        )
    say("")
    console(stderr=True).print(table)
    seed = f", seed {report.seed}" if sampled else ""
    peak = size_text(report.peak_rss_bytes)
    say(f"tokens generated: {len(report.tokens)}, ended by {_ENDS[report.finish]}{seed}; peak memory {peak}")
    say(
        f"{report.slots} slots of {report.expert_count} experts in {size_text(report.expert_memory_bytes)};"
        f" {size_text(report.resident_bytes)} resident"
    )
    say(f"backend {report.backend}, policy {report.policy}, reads {report.io_mode}")
    say(_streaming(report))


_ENDS = {"eos": "the model", "length": "-n", "interrupted": "interruption"}


def _streaming(report: GenerationReport) -> str:
    read = size_text(report.total.expert_bytes_read)
    if report.streaming:
        return f"Streaming was on: experts shared slots; {read} were read from the file."
    return f"Streaming was off: every expert had its own slot; {read} were read, no expert twice."


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"
