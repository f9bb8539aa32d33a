from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from tidegate_operator.kube.apply import is_same_status
from tidegate_operator.kube.backoff import Backoff
from tidegate_operator.kube.selector import matches
from tidegate_operator.kube.times import format_micro_time, format_time, parse_time

OWNED = frozenset({"phase", "pods"})


@pytest.mark.parametrize(
    ("status", "wanted", "want"),
    [
        ({"phase": "A", "theirs": 1}, {"phase": "A"}, True),
        ({"phase": "A"}, {"phase": "B"}, False),
        ({"phase": "A"}, {"phase": "A", "pods": {}}, False),
        ({"phase": "A", "pods": {}}, {"phase": "A"}, False),
        ({}, {}, True),
        (None, {"phase": "A"}, False),
    ],
    ids=["others' fields", "changed", "added", "left out", "empty", "no status yet"],
)
def test_status_is_same_by_owned_fields(status: Any, wanted: Any, want: bool) -> None:
    assert is_same_status({"status": status}, wanted, OWNED) is want


def expression(operator: str, *values: str) -> dict[str, Any]:
    part = {"key": "a", "operator": operator} | ({"values": list(values)} if values else {})
    return {"matchExpressions": [part]}


@pytest.mark.parametrize(
    ("selector", "labels", "want"),
    [
        (None, {"a": "1"}, False),
        ({}, {}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "1", "b": "2"}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "2"}, False),
        (expression("In", "1", "2"), {"a": "2"}, True),
        (expression("In", "1"), {}, False),
        (expression("NotIn", "1"), {}, True),
        (expression("NotIn", "1"), {"a": "1"}, False),
        (expression("Exists"), {"a": ""}, True),
        (expression("Exists"), {}, False),
        (expression("DoesNotExist"), {}, True),
        (expression("DoesNotExist"), {"a": "1"}, False),
        (expression("Gt", "1"), {"a": "2"}, False),
        ({"matchLabels": {"a": "1"}, **expression("In", "2")}, {"a": "1"}, False),
    ],
)
def test_selector_matches_labels(selector: Any, labels: dict[str, str], want: bool) -> None:
    assert matches(selector, labels) is want


@pytest.mark.parametrize(
    ("failures", "draw", "want"),
    [(1, 0.0, 0.5), (1, 1.0, 1.0), (3, 1.0, 4.0), (9, 1.0, 30.0), (10**6, 0.0, 15.0)],
)
def test_backoff_doubles_up_to_its_cap(failures: int, draw: float, want: float) -> None:
    assert Backoff(first_seconds=1, longest_seconds=30).delay(failures, draw) == want


def test_times_are_written_in_utc_and_read_back() -> None:
    moment = datetime(2026, 11, 29, 13, 0, 1, 500000, tzinfo=timezone(timedelta(hours=1)))
    assert format_time(moment) == "2026-11-29T12:00:01Z"
    assert format_micro_time(moment) == "2026-11-29T12:00:01.500000Z"
    assert parse_time("2026-11-29T12:00:01Z") == datetime(2026, 11, 29, 12, 0, 1, tzinfo=UTC)
    assert [parse_time(bad) for bad in (None, "", "soon", "2026-11-29T12:00:01")] == [None] * 4
