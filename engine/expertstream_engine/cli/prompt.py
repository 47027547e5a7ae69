"""Where the prompt of a run comes from: an option, token ids, standard input, or the bundled model's own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from expertstream_engine.cli.consoles import say

if TYPE_CHECKING:
    from expertstream_engine.prompts import Prompts

BUNDLED_PROMPT = "The LORD is my shepherd;"
"""In the style of what the bundled model was trained on."""


def read_prompt(prompts: Prompts, text: str | None, token_ids: str | None, *, bundled: bool) -> tuple[str, list[int]]:
    """The prompt as text, empty for one of `token_ids`, and as token ids, those of `token_ids` as they are.

    Raises ConfigError where there is none, or two.
    """
    from expertstream import ConfigError

    if text is not None and token_ids is not None:
        raise ConfigError("-p and --token-ids are two prompts; give one of them")
    if token_ids is not None:
        return "", [_token_id(item) for item in token_ids.split(",")]
    if text is None:
        text = _from_standard_input()
        if not text and bundled:
            say(f"prompt: {BUNDLED_PROMPT!r}, as {'none was given' if text is None else 'what was given is empty'}")
            text = BUNDLED_PROMPT
        if not text:
            raise ConfigError("there is no prompt: give -p TEXT, --token-ids 1,2,3, or text on standard input")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # an argument's bytes that are not UTF-8 arrive as lone surrogates
        raise ConfigError(f"the prompt is not UTF-8 at character {error.start}") from error
    return text, prompts.encode(text)


def _from_standard_input() -> str | None:
    """All of it without one final newline, None where a person would have to type it."""
    from expertstream import ConfigError

    if sys.stdin is None or sys.stdin.isatty():
        return None
    say("prompt: from standard input")  # said before, because whoever sits at the other end may not know to write one
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on standard input is not UTF-8 at byte {error.start}") from error


def _token_id(item: str) -> int:
    from expertstream import ConfigError

    stripped = item.strip()
    if not (stripped.isascii() and stripped.removeprefix("-").isdigit() and len(stripped) < 20):
        raise ConfigError(f"{item[:40]!r} in --token-ids is not a token id; write whole numbers like 1,2,3")
    return int(stripped)
