"""Which save a run is asked for: one at a time, shared by what comes close together."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tidegate_contract.keys import DrainState
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import AnswerResult, Phase, SaveAnswer
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.effective import HoldLimits
from tidegate_operator.gate.asks import current_ask, request_id
from tidegate_operator.gate.facts import Drain, Durable, LeadReport, NodeFacts, PodFacts, RunFacts

NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
RUN = "team-a/llama"
MAX_HOLD = timedelta(minutes=10)
LIMITS = HoldLimits(
    max_hold=MAX_HOLD,
    freshness=timedelta(seconds=60),
    contact_timeout=timedelta(seconds=60),
    release_ttl=timedelta(minutes=3),
    blocks_at_deadline=False,
)
SAVED = Attempt(step=120, nonce="00000000000000aa")


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def rid(trigger: float | str) -> int:
    return request_id(RUN, trigger if isinstance(trigger, str) else ago(trigger))


def a_drain(state: DrainState, requested: float, node: str = "a") -> Drain:
    at = ago(requested)
    return Drain(
        node=node,
        node_uid="",
        state=state,
        reason="Evicted",
        requested_at=at,
        deadline=at + MAX_HOLD,
    )


def a_report(trigger: float | str = "", result: str = "", known: float = 0) -> LeadReport:
    answer = None
    if result:
        answer = SaveAnswer(request_id=rid(trigger), result=AnswerResult(result), attempt=SAVED)
    return LeadReport(
        received_at=ago(1),
        phase=Phase.TRAINING,
        step=130,
        answer=answer,
        known_request_id=rid(known) if known else 0,
    )


def some_facts(cordons: dict[str, float] | None = None, **changes: Any) -> RunFacts:
    """Pods on nodes a and b, the newest durable step five minutes old; `cordons` by age."""
    ages = cordons or {}
    pods = [
        PodFacts(
            name=f"p-{node}",
            uid=f"p-{node}",
            node=node,
            is_running=True,
            is_over=False,
            is_terminating=False,
            has_hold=True,
        )
        for node in "ab"
    ]
    fields: dict[str, Any] = {
        "name": RUN,
        "mode": DrainMode.ENFORCE,
        "limits": LIMITS,
        "nodes": {
            node: NodeFacts(
                name=node, uid="", draining_since=ago(ages[node]) if node in ages else None
            )
            for node in "ab"
        },
        "pods": tuple(pods),
        "durable": Durable(step=100, nonce="", at=ago(300)),
        "report": a_report(),
        "last_report_at": ago(5),
    }
    return RunFacts(**fields | changes)


REQUESTED, SAVING, FLUSHING = DrainState.REQUESTED, DrainState.SAVING, DrainState.FLUSHING
DURABLE_30, DURABLE_70 = (Durable(step=1, nonce="", at=ago(age)) for age in (30, 70))
ASKS: dict[str, tuple[dict[str, Any], int | None]] = {
    "nothing": ({}, None),
    "drain": ({"drains": (a_drain(REQUESTED, 20),)}, rid(20)),
    "two-nodes-within-10-s-share-one": (
        {"drains": (a_drain(REQUESTED, 20), a_drain(REQUESTED, 12, "b"))},
        rid(20),
    ),
    "one-let-go-keeps-the-others-save": (
        {"drains": (a_drain(DrainState.RELEASED, 20), a_drain(SAVING, 12, "b"))},
        rid(20),
    ),
    "a-later-node-waits-for-the-copy-of-the-first": (
        {"drains": (a_drain(REQUESTED, 5, "b"), a_drain(FLUSHING, 20))},
        None,
    ),
    "sealed-is-not-asked-again": (
        {"drains": (a_drain(SAVING, 20),), "report": a_report(20, "Sealed")},
        None,
    ),
    "cordon-asks-early": ({"cordons": {"a": 3}}, rid(3)),
    "cordon-fresh": ({"cordons": {"a": 3}, "durable": DURABLE_30}, None),
    "cordon-saved-since": ({"cordons": {"a": 90}, "durable": DURABLE_70}, None),
    "cordon-long-ago": ({"cordons": {"a": 600}, "durable": None}, None),
    "cordon-observed": ({"cordons": {"a": 3}, "mode": DrainMode.OBSERVE}, rid(3)),
    "cordon-off": ({"cordons": {"a": 3}, "mode": DrainMode.OFF}, None),
    "cordon-answered": ({"cordons": {"a": 3}, "report": a_report(3, "NothingNew")}, None),
    "newest-cordon-covers-all": ({"cordons": {"a": 30, "b": 3}}, rid(3)),
    "early-save-in-flight-is-not-overtaken": (
        {
            "cordons": {"a": 3},
            "drains": (a_drain(REQUESTED, 2),),
            "report": a_report(known=3),
        },
        rid(3),
    ),
    "early-save-answers-its-drain": (
        {
            "cordons": {"a": 3},
            "drains": (a_drain(SAVING, 2),),
            "report": a_report(3, "Sealed", known=3),
        },
        None,
    ),
    "spec-asks": ({"save_value": "now", "save_asked_at": ago(1)}, rid("now")),
    "drain-over-spec": (
        {"save_value": "now", "save_asked_at": ago(1), "drains": (a_drain(REQUESTED, 20),)},
        rid(20),
    ),
    "spec-answered": (
        {"save_value": "now", "save_asked_at": ago(1), "report": a_report("now", "Sealed")},
        None,
    ),
}


@pytest.mark.parametrize(
    ("changes", "want"), [pytest.param(*row, id=name) for name, row in ASKS.items()]
)
def test_ask_is_one_save_at_a_time(changes: Any, want: int | None) -> None:
    facts = some_facts(**changes)
    ask = current_ask(facts, facts.drains, NOW)
    assert (ask.request_id if ask else None) == want


def test_ask_of_a_drain_ends_with_its_deadline() -> None:
    drain = a_drain(REQUESTED, 20)
    ask = current_ask(some_facts(), [drain], NOW)
    assert ask is not None
    assert ask.deadline == drain.deadline


def test_ask_after_a_second_request_is_another_one() -> None:
    first = a_drain(REQUESTED, 200)
    again = replace(first, requested_at=NOW)
    asks = [current_ask(some_facts(), [drain], NOW) for drain in (first, again)]
    assert None not in asks
    assert len({ask.request_id for ask in asks if ask}) == 2


def test_request_ids_differ_by_run_and_trigger_and_fit_the_message() -> None:
    ids = {request_id(run, ago(age)) for run in ("a/b", "a/c") for age in range(100)}
    assert len(ids) == 200
    assert all(0 < one < 2**63 for one in ids)
