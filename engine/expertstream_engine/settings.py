"""Everything a user may set for a run, with its default, in one place."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen, validators

from expertstream import BackendNames, StreamSettings
from expertstream.config import whole_number

DEFAULT_CONTEXT_TOKENS = 4096

COMMAND_LINE_ONLY = frozenset(
    {
        *("model", "prompt", "token_ids", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty"),
        *("seed", "ignore_eos", "save_hotlist", "config", "json", "verbose", "debug"),
    }
)
"""Options that are no settings: what to generate and what to show is said anew for each run."""


@frozen(kw_only=True)
class RunSettings(StreamSettings):
    """The core's settings and the engine's.

    `context` is in tokens; None takes the smaller of what the model was trained for and 4096. `threads` compute,
    None for one a core that this process may use; `filler_threads` read.
    `hotlist` seeds the slots; None takes the one beside the model, if there is one, and NO_HOTLIST none.
    """

    backend: BackendNames = "cpu"
    hotlist: Path | None = None
    context: int | None = field(default=None, validator=validators.optional(whole_number(1)))
    threads: int | None = field(default=None, validator=validators.optional(whole_number(1, 256)))
