"""Everything a user may set for a run, with its default, in one place."""

from __future__ import annotations

import os

from attrs import field, frozen, validators

from expertstream import StreamSettings

DEFAULT_CONTEXT_TOKENS = 4096


@frozen(kw_only=True)
class RunSettings(StreamSettings):
    """The core's settings and the engine's.

    `context` is in tokens; None takes the smaller of what the model was trained for and 4096. `threads` compute,
    None for one a core that this process may use; `filler_threads` read.
    """

    backend: str = "cpu"
    context: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    threads: int | None = field(default=None, validator=validators.optional(validators.in_(range(1, 257))))


def usable_cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
