"""Amounts of memory as people write them, and as exact integers of bytes.

GB is 10^9 and GiB is 2^30, and so on for K, M and T. A bare letter (20G) means the power of two, as `ls -h` and
`free -h` mean it. Upper and lower case are the same. No float is involved anywhere.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from attrs import field, frozen, validators

from expertstream.errors import ConfigError

_UNIT_BYTES = {
    "TiB": 1 << 40,
    "TB": 10**12,
    "GiB": 1 << 30,
    "GB": 10**9,
    "MiB": 1 << 20,
    "MB": 10**6,
    "KiB": 1 << 10,
    "KB": 10**3,
    "B": 1,
}
"""Bytes of each unit, largest first."""

_BYTES_OF_SPELLING = {spelling.lower(): unit_bytes for spelling, unit_bytes in _UNIT_BYTES.items()}
_BYTES_OF_SPELLING |= {letter.lower(): _UNIT_BYTES[f"{letter}iB"] for letter in "KMGT"}

_NUMBER = r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?)"
_AMOUNT = re.compile(rf"{_NUMBER} *(?P<unit>[A-Za-z]*)")
_PERCENTAGE = re.compile(rf"{_NUMBER} *%")

_FORMS = (
    "bytes (8589934592), or a number with KB, MB, GB, TB (powers of 1000) or with KiB, MiB, GiB, TiB, K, M, G, T "
    "(powers of 1024), a percentage of the routed experts (25%), or all"
)


def format_bytes(byte_count: int) -> str:
    """`byte_count` for people, with the exact bytes: "8.00 GiB (8589934592 bytes)"; decimals are cut, not rounded."""
    exact = f"{byte_count} byte{'' if byte_count == 1 else 's'}"
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        hundredths = byte_count * 100 // _UNIT_BYTES[unit]
        if hundredths >= 100:
            return f"{hundredths // 100}.{hundredths % 100:02} {unit} ({exact})"
    return exact


def round_up_bytes(byte_count: int) -> int:
    """The smallest amount from `byte_count` up that a person can type: of at most four digits and a unit."""
    unit_bytes = _typed_unit_bytes(byte_count)
    return -(-byte_count // unit_bytes) * unit_bytes


def round_down_bytes(byte_count: int) -> int:
    """The largest amount up to `byte_count` that a person can type: of at most four digits and a unit."""
    unit_bytes = _typed_unit_bytes(byte_count)
    return byte_count // unit_bytes * unit_bytes


@frozen(kw_only=True)
class MemoryRequest:
    """How much memory routed experts shall have: either `size_bytes`, or `percent` of the routed bytes of a checkpoint.

    100 % is "all": a slot for every expert, whatever the padding of slots adds. `str` gives a text that `parse` takes.
    """

    size_bytes: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    percent: Decimal | None = field(
        default=None, validator=validators.optional([validators.ge(Decimal(0)), validators.le(Decimal(100))])
    )

    def __attrs_post_init__(self) -> None:
        if (self.size_bytes is None) == (self.percent is None):
            raise ValueError("a MemoryRequest has either size_bytes or percent")

    @classmethod
    def parse(cls, text: str) -> MemoryRequest:
        """The request that `text` ("20GB", "12.5%", "all") means; a fraction of a byte is cut off.

        Raises ConfigError for anything else, saying what can be written.
        """
        stripped = text.strip()
        if stripped.lower() == "all":
            return cls(percent=Decimal(100))
        if percentage := _PERCENTAGE.fullmatch(stripped):
            percent = Decimal(percentage["number"])
            if percent > 100:
                raise ConfigError(f"{text!r} is more than all experts; 0% to 100% can be asked for")
            return cls(percent=percent)
        return cls(size_bytes=_parse_bytes(text))

    @property
    def is_nothing(self) -> bool:
        """Whether no memory is asked for."""
        return not self.size_bytes and not self.percent

    @property
    def every_expert(self) -> bool:
        """Whether each expert shall have a slot."""
        return self.percent == 100

    def resolve(self, routed_bytes: int) -> int:
        """The bytes asked for where all routed experts are `routed_bytes`; a fraction of a byte is cut off."""
        if self.percent is not None:
            return int(routed_bytes * Fraction(self.percent) / 100)
        assert self.size_bytes is not None
        return self.size_bytes

    def __str__(self) -> str:
        if self.percent is not None:
            return "all" if self.every_expert else f"{_plain(self.percent)}%"
        assert self.size_bytes is not None
        for unit, unit_bytes in _UNIT_BYTES.items():
            if unit_bytes > 1 and self.size_bytes and self.size_bytes % unit_bytes == 0:
                return f"{self.size_bytes // unit_bytes}{unit}"
        return str(self.size_bytes)


def _parse_bytes(text: str) -> int:
    amount = _AMOUNT.fullmatch(text.strip())
    unit_bytes = _BYTES_OF_SPELLING.get(amount["unit"].lower() or "b") if amount else None
    if amount is None or unit_bytes is None:
        raise ConfigError(f"{text!r} is not an amount of memory; what can be written: {_FORMS}")
    if unit_bytes == 1 and "." in amount["number"]:
        raise ConfigError(f"{text!r} is not a whole number of bytes; what can be written: {_FORMS}")
    return int(Fraction(amount["number"]) * unit_bytes)


def _typed_unit_bytes(byte_count: int) -> int:
    """The smallest unit in which `byte_count`, rounded either way, has at most four digits."""
    return next((unit for unit in (1, 1 << 10, 1 << 20, 1 << 30) if byte_count <= 9999 * unit), 1 << 40)


def _plain(number: Decimal) -> str:
    """A decimal without exponent and without needless zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
