import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_contract.cadence import (
    Cadence,
    CadenceKind,
    Progress,
    crosses,
    interval_seconds,
    is_due,
)


@given(st.lists(st.integers(0, 10_000), max_size=30), st.integers(1, 5000))
def test_crossing_counts_each_multiple_at_most_once(gains: list[int], interval: int) -> None:
    total, saves = 0, 0
    for gain in gains:
        saves += crosses(total, total + gain, interval)
        total += gain
    assert saves <= total // interval
    assert saves > 0 or total < interval


@pytest.mark.parametrize(
    ("cadence", "elapsed", "want"),
    [
        pytest.param(Cadence(tokens=100), False, True, id="tokens crossed"),
        pytest.param(Cadence(tokens=1000), True, False, id="tokens not crossed"),
        pytest.param(Cadence(by=CadenceKind.STEPS, steps=5), False, True, id="steps crossed"),
        pytest.param(Cadence(by=CadenceKind.STEPS, steps=6), True, False, id="steps not crossed"),
        pytest.param(
            Cadence(by=CadenceKind.INTERVAL, interval_seconds=60), True, True, id="time over"
        ),
        pytest.param(
            Cadence(by=CadenceKind.AUTO, max_loss_seconds=60), False, False, id="time not over"
        ),
    ],
)
def test_save_is_due(cadence: Cadence, elapsed: bool, want: bool) -> None:
    before, now = Progress(step=9, tokens=190), Progress(step=10, tokens=210)
    assert is_due(cadence, before, now, interval_elapsed=elapsed) is want


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 0},
        {"by": CadenceKind.STEPS},
        {"by": CadenceKind.INTERVAL, "interval_seconds": 0.0},
        {"by": CadenceKind.AUTO},
    ],
    ids=str,
)
def test_cadence_that_never_or_always_saves_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|needs its value"):
        Cadence(**fields)  # type: ignore[arg-type]


def test_auto_interval_keeps_the_accepted_loss() -> None:
    cadence = Cadence(by=CadenceKind.AUTO, max_loss_seconds=600)
    assert interval_seconds(cadence, stall_seconds=1, durable_seconds=120) == 480


def test_auto_interval_of_a_known_mtbf_is_dalys_optimum() -> None:
    cadence = Cadence(by=CadenceKind.AUTO, max_loss_seconds=1e6, mtbf_seconds=86_400)
    got = interval_seconds(cadence, stall_seconds=10, durable_seconds=0)
    young = math.sqrt(2 * 10 * 86_400)
    assert young - 10 < got < young
    assert got == pytest.approx(1307.88, abs=0.01)  # by hand from the formula
