"""Amounts of memory mean exactly what was written."""

import sys
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertstream.errors import ConfigError
from expertstream.units import MemoryRequest, format_bytes

EXPONENT_OF_UNIT = {
    f"{letter}{suffix}": (base, power)
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}
"""The rule as the user reads it, spelled out another way than the module does."""

beyond_a_float = st.integers(0, 10**29)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20GB", 20_000_000_000),
        ("20GiB", 21_474_836_480),
        ("20G", 21_474_836_480),
        ("20g", 21_474_836_480),
        ("20gb", 20_000_000_000),
        ("20 GB", 20_000_000_000),
        (" 20 gIb ", 21_474_836_480),
        ("1.5GiB", 1_610_612_736),
        ("20000000000", 20_000_000_000),
        ("20000000000 B", 20_000_000_000),
        ("0.1GB", 100_000_000),
        ("0.1GiB", 107_374_182),
        ("9007199254740993", 2**53 + 1),
        ("9007199254740993KB", (2**53 + 1) * 1000),
        ("0", 0),
    ],
)
def test_the_published_spellings_mean_exactly_this(text: str, expected: int) -> None:
    assert MemoryRequest.parse(text).resolve(routed_bytes=1) == expected


@given(beyond_a_float, st.sampled_from(sorted(EXPONENT_OF_UNIT)))
def test_a_unit_multiplies_exactly_beyond_what_a_float_holds(number: int, unit: str) -> None:
    base, power = EXPONENT_OF_UNIT[unit]
    assert MemoryRequest.parse(f"{number}{unit}").size_bytes == number * base**power


@given(
    st.integers(0, 10**20), st.text("0123456789", min_size=1, max_size=20), st.sampled_from(sorted(EXPONENT_OF_UNIT))
)
def test_a_fraction_of_a_byte_is_cut_off(whole: int, decimals: str, unit: str) -> None:
    base, power = EXPONENT_OF_UNIT[unit]
    exact = Fraction(int(f"{whole}{decimals}"), 10 ** len(decimals)) * base**power
    assert MemoryRequest.parse(f"{whole}.{decimals}{unit}").size_bytes == exact.numerator // exact.denominator


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "GB", "-1GB", "+1GB", "1e9", "1_000", "1,5GB", "1.GB", ".5GB", "1.5", "1.5B", "0x10", "nan", "inf"],
        *["20GBs", "20 iB", "20X", "٣GB", "20\u212a", "20GB 1", "20\nGB", "9" * 31, "9" * 5000],
    ],
)
def test_what_is_not_an_amount_is_refused_with_what_was_written_and_what_can_be(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        MemoryRequest.parse(text)
    assert repr(text) in str(refusal.value)
    assert "GiB" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "routed_bytes", "expected"),
    [
        ("25%", 1001, 250),
        ("12.5%", 1000, 125),
        ("12.5 %", 999, 124),
        ("0%", 999, 0),
        ("all", 2**63 + 1, 2**63 + 1),
        ("ALL", 5, 5),
        ("100%", 2**63 + 1, 2**63 + 1),
        ("33.333333333333333333%", 10**20, 33333333333333333333),
    ],
)
def test_a_percentage_is_of_the_routed_bytes_and_never_rounds_up(text: str, routed_bytes: int, expected: int) -> None:
    assert MemoryRequest.parse(text).resolve(routed_bytes) == expected


def test_all_is_a_hundred_percent_and_nothing_else_is() -> None:
    assert MemoryRequest.parse("all") == MemoryRequest.parse("100.0%")
    assert MemoryRequest.parse("all").every_expert
    assert not MemoryRequest.parse("99.99%").every_expert
    assert not MemoryRequest.parse("100").every_expert


@pytest.mark.parametrize("text", ["100.01%", "101%", "-1%", "%", "1e1%", "twenty%", "25%%", "25% GB"])
def test_a_percentage_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        MemoryRequest.parse(text)
    assert repr(text) in str(refusal.value)


percentages = st.decimals(0, 100, places=4).map(str)


@given(
    st.one_of(
        st.integers(0, sys.maxsize).map(str),
        st.builds("{}{}".format, st.integers(0, 5000), st.sampled_from(sorted(EXPONENT_OF_UNIT))),
        percentages.map(lambda percent: f"{percent}%"),
        st.just("all"),
    )
)
def test_the_text_of_a_request_means_the_same_request(text: str) -> None:
    request = MemoryRequest.parse(text)
    assert MemoryRequest.parse(str(request)) == request


@given(percentages, st.integers(0, 10**25))
def test_a_percentage_is_exact(percent: str, routed_bytes: int) -> None:
    exact = routed_bytes * Fraction(percent) / 100
    assert MemoryRequest.parse(f"{percent}%").resolve(routed_bytes) == exact.numerator // exact.denominator


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("20GB", "20GB"),
        ("20 gib", "20GiB"),
        ("1536M", "1536MiB"),
        ("1.5GiB", "1536MiB"),
        ("4097", "4097"),
        ("0", "0"),
        ("12.50%", "12.5%"),
        ("50%", "50%"),
        ("0.0%", "0%"),
        ("100%", "all"),
    ],
)
def test_a_request_is_written_in_the_largest_unit_that_is_exact(text: str, written: str) -> None:
    assert str(MemoryRequest.parse(text)) == written


@pytest.mark.parametrize("arguments", [{}, {"size_bytes": 1, "percent": Decimal(1)}, {"size_bytes": -1}])
def test_a_request_is_either_bytes_or_a_percentage(arguments: dict[str, int | Decimal]) -> None:
    with pytest.raises(ValueError, match="size_bytes"):
        MemoryRequest(**arguments)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("byte_count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB (1024 bytes)"),
        (8 << 30, "8.00 GiB (8589934592 bytes)"),
        (20 * 10**9, "18.62 GiB (20000000000 bytes)"),
        ((1 << 30) - 1, "1023.99 MiB (1073741823 bytes)"),
        (5 << 40, "5.00 TiB (5497558138880 bytes)"),
    ],
)
def test_a_size_shows_its_exact_bytes_next_to_the_unit(byte_count: int, text: str) -> None:
    assert format_bytes(byte_count) == text


@given(st.integers(0, 2**90))
def test_a_shown_size_is_never_more_than_there_is(byte_count: int) -> None:
    shown, _, rest = format_bytes(byte_count).partition(" (")
    if rest:
        number, unit = shown.split()
        base, power = EXPONENT_OF_UNIT[unit]
        assert 0 <= byte_count - Fraction(number) * base**power < Fraction(base**power, 100)
        assert int(rest.split()[0]) == byte_count
