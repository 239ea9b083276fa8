import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.units import (
    format_bandwidth,
    format_bytes,
    format_duration,
    parse_bandwidth,
    parse_bytes,
    parse_moment,
)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("2.5Gbps", 2.5e9),
        ("2.5 Gbps", 2.5e9),
        (" 100 Mbit/s ", 1e8),
        ("100mbps", 1e8),
        ("9600bps", 9600),
        ("1Tbps", 1e12),
        ("10kbit", 1e4),
        ("10G", 1e10),
        ("2.5GbE", 2.5e9),
        ("1 Gb/s", 1e9),
        ("100Mb", 1e8),
    ],
)
def test_bandwidth_is_read_in_decimal_bits_a_second(text: str, bits_per_s: float) -> None:
    assert parse_bandwidth(text) == bits_per_s


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2.5",
        "fast",
        "2,5Gbps",
        "-1Gbps",
        "0Gbps",
        "0.0Mbps",
        "2.5GB/s",
        "2.5Gbs",
        "2.5GB",
        "10b",
        "1e3bps",
        "infbps",
        "٣Gbps",
    ],
)
def test_what_is_no_bandwidth_is_refused_with_the_form_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it like 2\.5Gbps or 100Mbps"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("16GiB", 16 * 2**30), ("100 MB", 10**8), ("512B", 512), ("1.5KiB", 1536), ("2tib", 2**41), ("0B", 0)],
)
def test_bytes_keep_binary_and_decimal_prefixes_apart(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "16", "16G", "-1GiB", "16Gib/s", "1iB", "many"])
def test_what_is_no_size_is_refused_with_the_form_expected(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 16GiB or 100MB"):
        parse_bytes(text)


@pytest.mark.parametrize("digits", ["9" * 400, "1." + "9" * 400])
def test_a_number_of_absurd_length_is_refused(digits: str) -> None:
    with pytest.raises(ValueError, match="is not a bandwidth"):
        parse_bandwidth(digits + "Gbps")
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(digits + "GiB")


@given(st.text(max_size=20) | st.from_regex(r"[0-9]{1,400}(\.[0-9]{1,400})?[kMGT]?(bps|i?B)", fullmatch=True))
def test_any_text_gives_a_finite_quantity_or_a_value_error(text: str) -> None:
    for parse in (parse_bandwidth, parse_bytes):
        try:
            assert 0 <= parse(text) < math.inf
        except ValueError as error:
            assert "write it like" in str(error)


@given(st.floats(0.01, 9e15))
def test_a_bandwidth_comes_back_from_its_printed_form(bits_per_s: float) -> None:
    assert parse_bandwidth(format_bandwidth(bits_per_s)) == pytest.approx(bits_per_s, rel=6e-4)


@given(st.integers(0, 10**15))
def test_a_size_comes_back_from_its_printed_form(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize(
    ("bits_per_s", "text"),
    [(2.5e9, "2.5Gbps"), (1e8, "100Mbps"), (999.0, "999bps"), (1e12, "1Tbps"), (2000.0, "2kbps")],
)
def test_a_bandwidth_is_printed_in_its_largest_unit(bits_per_s: float, text: str) -> None:
    assert format_bandwidth(bits_per_s) == text


def test_a_size_is_printed_in_binary_units() -> None:
    assert [format_bytes(count) for count in (0, 1023, 1024, 16 * 2**30)] == ["0B", "1023B", "1.0KiB", "16.0GiB"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (4.24, "4.2s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (187, "3m07s"),
        (3599.6, "1h00m"),
        (7500, "2h05m"),
    ],
)
def test_a_duration_is_printed_in_at_most_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_moment_is_a_time_of_this_machines_clock_also_across_its_change(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        summer, night = 1_792_843_500.0, 1_792_893_600.0  # 2026-10-24 14:05; 2026-10-25 03:00, after the change
        for now in (summer, night, night + 86_400):
            assert parse_moment("2026-10-24 14:05:00", now) == summer
        assert parse_moment("01:00", night) == night - 3 * 3600
    finally:
        monkeypatch.undo()
        time.tzset()
