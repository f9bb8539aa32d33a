from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_operator.quantity import (
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("0s", timedelta(0)),
        ("500ms", timedelta(milliseconds=500)),
        ("60s", timedelta(minutes=1)),
        ("10m", timedelta(minutes=10)),
        ("1h30m", timedelta(minutes=90)),
        ("30m1h", timedelta(minutes=90)),
        ("1m1m", timedelta(minutes=2)),
        ("720h", timedelta(days=30)),
        ("1m5ms", timedelta(seconds=60, milliseconds=5)),
    ],
)
def test_duration_of_whole_parts_is_their_sum(text: str, want: timedelta) -> None:
    assert parse_duration(text) == want


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("10", id="no-unit"),
        pytest.param("m", id="no-number"),
        pytest.param("-10m", id="negative"),
        pytest.param("1.5h", id="fraction"),
        pytest.param("1d", id="days"),
        pytest.param("10M", id="capital"),
        pytest.param("1h 30m", id="space"),
        pytest.param("10m\n", id="newline"),
        pytest.param("PT30S", id="iso"),
        pytest.param("\u0661\u0660m", id="arabic-digits"),
        pytest.param("9999999999999h", id="longer-than-int64-nanoseconds"),
    ],
)
def test_duration_with_bad_text_is_refused_quoting_it(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration") as refusal:
        parse_duration(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (timedelta(0), "0s"),
        (timedelta(seconds=90), "1m30s"),
        (timedelta(hours=36), "36h"),
        (timedelta(seconds=1.5), "1s500ms"),
        (timedelta(hours=1, milliseconds=1), "1h1ms"),
        (timedelta(microseconds=1999), "1ms"),
    ],
)
def test_duration_is_written_in_largest_units(value: timedelta, want: str) -> None:
    assert format_duration(value) == want


def test_duration_below_zero_is_not_written() -> None:
    with pytest.raises(ValueError, match="zero or longer"):
        format_duration(timedelta(seconds=-1))


@given(st.integers(min_value=0, max_value=9 * 10**12))
def test_duration_written_is_read_back(milliseconds: int) -> None:
    value = timedelta(milliseconds=milliseconds)
    assert parse_duration(format_duration(value)) == value


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("0", 0),
        ("1073741824", 2**30),
        ("1Ki", 1024),
        ("800Mi", 800 * 2**20),
        ("41Gi", 41 * 2**30),
        ("2Ti", 2 * 2**40),
        ("3Pi", 3 * 2**50),
    ],
)
def test_size_counts_bytes_in_binary_units(text: str, want: int) -> None:
    assert parse_size(text) == want


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("Mi", id="no-number"),
        pytest.param("800M", id="decimal-unit"),
        pytest.param("800MB", id="two-letters"),
        pytest.param("1.5Gi", id="fraction"),
        pytest.param("-1Gi", id="negative"),
        pytest.param("1 Gi", id="space"),
        pytest.param("1Gi\n", id="newline"),
        pytest.param("1Ei", id="unit-too-large"),
    ],
)
def test_size_with_bad_text_is_refused_quoting_it(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size") as refusal:
        parse_size(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("size_bytes", "want"),
    [(0, "0"), (1023, "1023"), (800 * 2**20, "800Mi"), (2**30 + 1, "1073741825"), (2**50, "1Pi")],
)
def test_size_is_written_exactly(size_bytes: int, want: str) -> None:
    assert format_size(size_bytes) == want


def test_size_below_zero_is_not_written() -> None:
    with pytest.raises(ValueError, match="zero or more"):
        format_size(-1)


@given(st.integers(min_value=0, max_value=2**63))
def test_size_written_is_read_back(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes
