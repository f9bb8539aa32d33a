"""What all ranks decide from one sum."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tidegate.agreement import (
    Agreement,
    AgreementLost,
    Message,
    Refusal,
    Standing,
    Total,
    Wish,
    decide_refusal,
    decide_wish,
)
from tidegate_contract.cadence import Cadence, CadenceKind, Progress
from tidegate_contract.seal import SaveReason
from tidegate_contract.wire import OnBusy

FIELDS = Message.__dataclass_fields__


def total_of(*messages: Message) -> Total:
    """As the all-reduce gives it."""
    sums = {name: sum(getattr(message, name) for message in messages) for name in FIELDS}
    squares = sum(message.step**2 for message in messages)
    return Total(world_size=len(messages), step_squares=squares % 2**64, sums=Message(**sums))


def both(**fields) -> Total:
    """Two ranks with slots at step 10; `fields` are rank 0's."""
    quiet = Message(step=10, free=1)
    return total_of(replace(quiet, **{"interval": 1, **fields}), quiet)


def standing(**fields) -> Standing:
    """Saves every 100 tokens; this message leads from 190 to 199."""
    return Standing(
        **{
            "cadence": Cadence(tokens=100),
            "on_busy": OnBusy.BLOCK,
            "before": Progress(step=9, tokens=190),
            "now": Progress(step=10, tokens=199),
            **fields,
        }
    )


CROSSED = Progress(step=10, tokens=200)
CADENCE = Wish(reason=SaveReason.CADENCE, is_owed=True)
BY_TIME = Cadence(by=CadenceKind.INTERVAL, interval_seconds=60)


@pytest.mark.parametrize(
    ("total", "known", "want"),
    [
        pytest.param(both(), standing(), Wish(), id="nothing due"),
        pytest.param(both(), standing(now=CROSSED), CADENCE, id="tokens crossed"),
        pytest.param(both(), standing(is_owed=True), CADENCE, id="owed from before"),
        pytest.param(
            both(interval=0),
            standing(now=CROSSED),
            Wish(is_owed=True),
            id="too soon",
        ),
        pytest.param(
            both(backlogged=1),
            standing(now=CROSSED),
            Wish(is_owed=True),
            id="flush behind: later",
        ),
        pytest.param(
            both(backlogged=1),
            standing(now=CROSSED, on_busy=OnBusy.SKIP),
            Wish(is_skipped=True),
            id="flush behind: skipped",
        ),
        pytest.param(both(interval=1), standing(cadence=BY_TIME), CADENCE, id="interval over"),
        pytest.param(both(interval=0), standing(cadence=BY_TIME), Wish(), id="interval not over"),
        pytest.param(
            both(request=5, backlogged=1, interval=0),
            standing(),
            Wish(reason=SaveReason.REQUEST),
            id="a request waits for nothing",
        ),
        pytest.param(
            both(request=5),
            standing(now=CROSSED),
            Wish(reason=SaveReason.REQUEST, is_owed=True),
            id="a request leaves what is due owed until it is saved",
        ),
        pytest.param(both(request=5), standing(request_taken=5), Wish(), id="request obeyed once"),
        pytest.param(
            both(request=5, terminating=1), standing(), Wish(is_stop=True), id="stop comes first"
        ),
        pytest.param(
            both(terminating=1), standing(is_owed=True), Wish(is_stop=True, is_owed=True), id="stop"
        ),
    ],
)
def test_wish(total, known, want):
    assert decide_wish(total, known) == want


@pytest.mark.parametrize(
    ("total", "want"),
    [
        pytest.param(both(), None, id="all ready"),
        pytest.param(both(free=0), Refusal.NO_SLOT, id="one without a slot"),
        pytest.param(both(closing=1), Refusal.CLOSING, id="one closes"),
        pytest.param(both(closing=1, step=11), Refusal.CLOSING, id="closing explains the step"),
        pytest.param(both(step=11), Refusal.UNEQUAL_STEPS, id="one ahead"),
    ],
)
def test_refusal(total, want):
    assert decide_refusal(total) == want


@pytest.mark.parametrize(
    ("steps", "want"),
    [
        ((5, 5, 5), True),
        ((4, 5, 6), False),
        ((2**31 - 1,) * 3, True),
        ((2**31 - 1, 2**31 - 1, 2**31 - 2), False),
        ((0,), True),
    ],
    ids=["equal", "same sum", "equal beyond 64 bits", "unequal beyond 64 bits", "one rank"],
)
def test_equal_steps_are_told_from_the_sums(steps, want):
    assert total_of(*(Message(step=step) for step in steps)).has_equal_steps is want


def test_total_is_closed_only_by_all_at_one_step():
    closing = Message(step=10, closing=1)
    assert total_of(closing, closing).is_closed_by_all
    assert not total_of(closing, replace(closing, step=11)).is_closed_by_all
    assert not total_of(closing, replace(closing, closing=0)).is_closed_by_all


def test_attempt_is_settled_when_every_rank_told_its_outcome():
    assert total_of(Message(step=1, sealed=1), Message(step=1, failed=1)).is_settled
    assert not total_of(Message(step=1, sealed=1), Message(step=1)).is_settled


class Late:
    """Work whose message comes between the end of a slice and the next look."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self._waits = 0

    def wait(self, *_: object) -> None:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return True


def read(monkeypatch, work: Late) -> Total | None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: work)
    agreement = Agreement(None, 1, timedelta(minutes=30))
    agreement.post(Message(step=3))
    return agreement.read()


def test_message_that_comes_as_a_slice_ends_is_read(monkeypatch):
    total = read(monkeypatch, Late())
    assert total is not None
    assert total.step == 3


def test_message_that_failed_as_a_slice_ended_is_lost_by_its_own_error(monkeypatch):
    with pytest.raises(AgreementLost, match="peer is gone"):
        read(monkeypatch, Late("peer is gone"))
