"""What a generation cost, in words: the line while it lasts and the report at its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from expertstream_engine.cli.consoles import counted, say, size_text

if TYPE_CHECKING:
    from expertstream_engine.report import GenerationReport


def prompt_line(report: GenerationReport, steps: int) -> str:
    """How far the prompt is read: layers done of `steps`, bytes of experts so far, their speed, the host tier."""
    read_bytes, seconds = report.prefill.expert_bytes_read, report.prefill_seconds
    speed = f" at {size_text(int(read_bytes / seconds))}/s" if seconds else ""
    parts = [
        f"reading the prompt of {counted(len(report.prompt_tokens), 'token')}: layer {report.prefill.steps} of {steps}",
        f"{size_text(read_bytes)} of experts read{speed}",
        *_pinning(report),
    ]
    return ", ".join(parts)


def status_line(report: GenerationReport, max_tokens: int) -> str:
    """Where a generation stands: speed, hit rate and bytes per token of the decode so far."""
    parts = [f"{len(report.tokens)}/{counted(max_tokens, 'token')}"]
    if speed := report.decode_tokens_per_second:
        parts.append(f"{speed:.1f} tokens/s")
        parts.append(f"hit rate {_percent(report.decode.hit_rate)}")
        if report.host_slots:
            decode = report.decode
            parts.append(f"host tier {_percent(decode.host_hits / decode.misses if decode.misses else None)} of misses")
        parts += _pinning(report)
        parts.append(f"{size_text(report.decode.expert_bytes_read // report.decode_passes)} per token")
    return ", ".join(parts)


def _pinning(report: GenerationReport) -> Iterator[str]:
    """How much of a host tier there is, while that is not all of it."""
    if report.host_slots < report.planned_host_slots:
        yield f"{report.host_slots} of {counted(report.planned_host_slots, 'host slot')} pinned"


def print_report(report: GenerationReport) -> None:
    """Print the figures on stderr, prefill and decode apart, and whether streaming was really on."""
    was_read = bool(report.tokens)  # else it ended before the first choice, however much of the prompt was read
    rows = [("", "tokens", "seconds", "tokens/s", "hit rate", "experts read per token")]
    for phase, counters, tokens, seconds in (
        ("prefill", report.prefill, len(report.prompt_tokens) if was_read else 0, report.prefill_seconds),
        ("decode", report.decode, report.decode_passes, report.decode_seconds),
    ):
        rows.append(
            (
                phase,
                str(tokens) if was_read else "-",
                f"{seconds:.2f}",
                f"{tokens / seconds:.1f}" if tokens and seconds else "-",
                _percent(counters.hit_rate),
                size_text(counters.expert_bytes_read // tokens) if tokens else "-",
            )
        )
    say("")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        say("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
    seed = "" if report.seed is None else f", seed {report.seed}"
    where = "" if was_read else ", before the first token"
    say(f"{counted(len(report.tokens), 'token')} generated, ended by {_ENDS[report.finish]}{where}{seed}")
    say(
        f"peak memory {size_text(report.peak_rss_bytes)}: {size_text(report.planned_bytes)} were planned, and Python"
        f" with its libraries took {size_text(report.interpreter_bytes)} before"
    )
    slot, expert = report.expert_memory_bytes // report.slots, report.routed_bytes // report.expert_count
    say(
        f"{counted(report.slots, 'slot')} of about {size_text(slot)}, in whole pages, for {report.expert_count} experts"
        f" of about {size_text(expert)}: {size_text(report.expert_memory_bytes)};"
        f" {size_text(report.resident_bytes)} resident"
    )
    say(f"backend {report.backend}, policy {report.policy}, reads {report.io_mode}")
    for line in _of_device(report):
        say(line)
    if report.total.misses:
        say(f"{report.total.disk_wait_s:.2f} s were spent waiting for the file")
    if report.seeded_experts:
        say(f"{counted(report.seeded_experts, 'expert')} of the hotlist were read before the prompt.")
    say(_streaming(report))


_ENDS = {"eos": "the model", "length": "its limit (-n)", "interrupted": "interruption", "failed": "failure"}


def _of_device(report: GenerationReport) -> Iterator[str]:
    """What concerns a device's memory: how much of it there is, and what went between. Nothing without a device."""
    total = report.total
    if report.device_bytes:
        yield (
            f"device memory {size_text(report.device_bytes)}, {size_text(report.planned_device_bytes)} were planned;"
            f" {size_text(total.h2d_bytes)} of slots were copied to it and {size_text(total.d2h_bytes)} from it"
        )
    planned = report.planned_host_slots
    if report.host_slots or report.host_tier_growing:
        if report.host_tier_growing:
            slots = f", {report.host_slots} of {counted(planned, 'planned host slot')} pinned so far"
        else:
            of_planned = "" if report.host_slots == planned else f" of {planned} planned"
            slots = f" of {counted(report.host_slots, 'slot')}{of_planned}"
        yield (
            f"{report.host_tiering} host tier{slots}, pinned memory {size_text(report.pinned_bytes)}: {total.host_hits}"
            f" of {total.misses} misses were found there"
        )
    elif report.device_bytes:
        why = f", although {counted(planned, 'slot')} were planned: the log says why" if planned else ""
        yield f"no host tier{why}; pinned memory {size_text(report.pinned_bytes)}"
    elif report.on_device and report.pinned_bytes:
        yield f"the device reads slots in {size_text(report.pinned_bytes)} of pinned host memory"


def _streaming(report: GenerationReport) -> str:
    read = f"{size_text(report.total.expert_bytes_read)} were read{' after that' if report.seeded_experts else ''}"
    if report.streaming:
        return f"Streaming was on: experts shared slots; {read} from the file."
    return f"Streaming was off: every expert had its own slot; {read}, no expert twice."


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"
