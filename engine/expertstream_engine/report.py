"""What a generation cost: counters of the two phases, times, memory, as one record and as JSON."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from expertstream import Counters


@frozen
class DeviceMemory:
    """What a model has of memory that is not the host's alone, in bytes.

    `device_bytes` lie on a device with memory of its own, weights and caches included; `pinned_bytes` are pinned host
    memory: staging buffers and host slots, or slots that are wired. Both are 0 where there are none.
    """

    device_bytes: int
    pinned_bytes: int


@frozen
class GenerationReport:
    """The figures of one generation. Times are seconds of wall clock, sizes bytes.

    Prefill needs every expert that any prompt token chose, so it exhausts any cache; it is counted apart. The first
    token comes out of the prefill: decode is the passes after it. `finish` is "eos", "length", "interrupted", "failed".
    `seeded_experts` were read from a hotlist before, and count in neither phase. `decode_seconds` are those of passes,
    choice of tokens and their text; what the caller does between two pieces is not in them. The peak is of the
    process: `planned_bytes` for the model and `interpreter_bytes` for Python and its libraries, measured before
    anything was loaded, are most of it.
    `device_bytes`, of `planned_device_bytes`, and `pinned_bytes` are those of DeviceMemory, a host tier of `host_slots`
    included, which grows towards `planned_host_slots` where `host_tier_growing`, and otherwise is as large as it gets.
    `seed` repeats the draws, None where nothing was drawn.
    `on_device` says that slots are a device's, which computes or has memory of its own.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    finish: str
    backend: str
    policy: str
    io_mode: str
    slots: int
    expert_count: int
    routed_bytes: int
    expert_memory_bytes: int
    resident_bytes: int
    host_slots: int
    planned_host_slots: int
    host_tier_growing: bool
    host_tiering: str | None
    on_device: bool
    device_bytes: int
    pinned_bytes: int
    seeded_experts: int
    prefill: Counters
    decode: Counters
    prefill_seconds: float
    decode_seconds: float
    decode_passes: int
    planned_bytes: int
    planned_device_bytes: int
    interpreter_bytes: int
    peak_rss_bytes: int
    seed: int | None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Passes after the first token over their time, None where there were none."""
        return self.decode_passes / self.decode_seconds if self.decode_passes and self.decode_seconds else None

    @property
    def streaming(self) -> bool:
        """Whether experts had to share slots; where each has its own, it is read once and stays."""
        return self.slots < self.expert_count

    @property
    def total(self) -> Counters:
        """Both phases together."""
        return self.prefill + self.decode

    def to_json(self) -> dict[str, Any]:
        """The record that `expertstream run --json` prints."""
        total = self.total
        fields = asdict(self, recurse=False)
        for phase in ("prefill", "decode"):
            counters: Counters = getattr(self, phase)
            fields[phase] = asdict(counters) | {"hit_rate": counters.hit_rate}
        fields["prompt_tokens"], fields["tokens"] = list(self.prompt_tokens), list(self.tokens)
        return fields | {
            "streaming": self.streaming,
            "hits": total.hits,
            "misses": total.misses,
            "hit_rate": total.hit_rate,
            "device_hits": total.hits if self.on_device else 0,
            "host_hits": total.host_hits,
            "expert_bytes_read": total.expert_bytes_read,
            "h2d_bytes": total.h2d_bytes,
            "d2h_bytes": total.d2h_bytes,
            "disk_wait_s": total.disk_wait_s,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }


def rss_bytes() -> int:
    """The memory that this process has in use now; where the system does not tell, the most it has had."""
    return _of_status("VmRSS") or _peak_of_usage_bytes()


def peak_rss_bytes() -> int:
    """The most memory that this process has had in use, by the system's own accounting."""
    return (
        _of_status("VmHWM") or _peak_of_usage_bytes()
    )  # in this order: ru_maxrss begins with the parent's at the fork


def _of_status(name: str) -> int | None:
    """A line of /proc/self/status in bytes, None where there is none; proc_pid_status(5)."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _peak_of_usage_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
