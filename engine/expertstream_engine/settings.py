"""Everything a user may set for a run, with its default, in one place."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen, validators

from expertstream import BackendNames, StreamSettings

DEFAULT_CONTEXT_TOKENS = 4096


@frozen(kw_only=True)
class RunSettings(StreamSettings):
    """The core's settings and the engine's.

    `context` is in tokens; None takes the smaller of what the model was trained for and 4096. `threads` compute,
    None for one a core that this process may use; `filler_threads` read.
    `hotlist` seeds the slots; None takes the one beside the model, if there is one.
    """

    backend: BackendNames = "cpu"
    hotlist: Path | None = None
    context: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    threads: int | None = field(default=None, validator=validators.optional(validators.in_(range(1, 257))))
