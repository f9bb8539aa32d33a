"""A save that nobody makes in time stands in no drain's way, and no ask is handed out for ever."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tidegate_contract.keys import DrainState
from tidegate_contract.wire import AnswerResult, Phase, SaveAnswer
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.effective import HoldLimits
from tidegate_operator.gate.asks import current_ask, request_id
from tidegate_operator.gate.facts import Drain, Durable, LeadReport, NodeFacts, PodFacts, RunFacts
from tidegate_operator.gate.hold import decide
from tidegate_operator.gate.observe import observe_run
from tidegate_operator.gate.records import RunRecord, slim_run
from tidegate_operator.gate.world import World
from tidegate_operator.kube.kinds import Key
from tidegate_operator.kube.times import format_time
from tidegate_operator.kube.watch import Change, ChangeType
from tidegate_operator.settings import DrainSettings

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
RUN = "team-a/llama"
LIMITS = HoldLimits(
    max_hold=timedelta(minutes=10),
    freshness=timedelta(seconds=60),
    contact_timeout=timedelta(seconds=60),
    release_ttl=timedelta(minutes=3),
    blocks_at_deadline=False,
)
BY_SPEC = request_id(RUN, "now")


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def a_drain(requested: float) -> Drain:
    at = ago(requested)
    return Drain(
        node="a",
        node_uid="",
        state=DrainState.REQUESTED,
        reason="Evicted",
        requested_at=at,
        deadline=at + LIMITS.max_hold,
    )


def some_facts(asked: float, drained: float | None, answer: str = "") -> RunFacts:
    """A run whose lead knows a request of `spec.saveRequest`; times in seconds ago."""
    told = SaveAnswer(request_id=BY_SPEC, result=AnswerResult(answer)) if answer else None
    report = LeadReport(
        received_at=ago(1),
        phase=Phase.TRAINING,
        step=130,
        stated_at=ago(1),
        answer=told,
        known_request_id=BY_SPEC,
    )
    pod = PodFacts(
        name="p0",
        uid="p0",
        node="a",
        is_running=True,
        is_over=False,
        is_terminating=False,
        has_hold=True,
    )
    return RunFacts(
        name=RUN,
        mode=DrainMode.ENFORCE,
        limits=LIMITS,
        drains=() if drained is None else (a_drain(drained),),
        nodes={"a": NodeFacts(name="a", uid="")},
        pods=(pod,),
        durable=Durable(step=100, nonce="", at=ago(300)),
        report=report,
        last_report_at=ago(5),
        save_value="now",
        save_asked_at=ago(asked),
    )


BY_DRAIN = request_id(RUN, ago(5))
ASKS: dict[str, tuple[RunFacts, int | None]] = {
    "known-and-young-goes-first": (some_facts(59, 5), BY_SPEC),
    "known-and-not-begun-in-time": (some_facts(60, 5), BY_DRAIN),
    "begun-goes-on": (some_facts(599, 5, "Acknowledged"), BY_SPEC),
    "begun-but-over-its-deadline": (some_facts(600, 5, "Acknowledged"), BY_DRAIN),
    "expired-long-ago": (some_facts(90_000, 5), BY_DRAIN),
    "no-drain-not-begun-yet": (some_facts(599, None), BY_SPEC),
    "no-drain-expired": (some_facts(600, None), None),
}


@pytest.mark.parametrize(
    ("facts", "want"), [pytest.param(*row, id=name) for name, row in ASKS.items()]
)
def test_ask_that_is_late_gives_way_to_a_drains(facts: RunFacts, want: int | None) -> None:
    ask = current_ask(facts, facts.drains, NOW)
    assert (ask.request_id if ask else None) == want


def test_deadline_of_an_ask_by_spec_is_fixed_by_its_trigger() -> None:
    facts = some_facts(5, None)
    for later in (0, 30, 300):
        ask = current_ask(facts, (), NOW + timedelta(seconds=later))
        assert ask is not None
        assert ask.deadline == ago(5) + LIMITS.max_hold


def test_drain_behind_a_late_ask_has_all_its_time_to_be_heard() -> None:
    facts = some_facts(asked=100, drained=90)
    for later, want in ((0, "Requested"), (19, "Requested"), (20, "Released")):
        (drain,) = decide(facts_at(facts, later), NOW + timedelta(seconds=later)).drains
        assert drain.state == want


def facts_at(facts: RunFacts, later: float) -> RunFacts:
    assert facts.report is not None
    at = NOW + timedelta(seconds=later)
    return replace(facts, report=replace(facts.report, received_at=at))


def a_run(*notes: Any) -> Any:
    metadata = {
        "name": "llama",
        "namespace": "team-a",
        "uid": "u",
        "resourceVersion": "5",
        "generation": 1,
        "managedFields": list(notes),
    }
    return {"metadata": metadata, "spec": {"saveRequest": "now"}, "status": {}}


def a_note(age: float, fields: Any) -> Any:
    return {"manager": "kubectl", "time": format_time(ago(age)), "fieldsV1": fields}


SETS: Any = {"f:spec": {"f:saveRequest": {}}}
NOTES: dict[str, tuple[tuple[Any, ...], datetime | None]] = {
    "set": ((a_note(50, SETS), a_note(5, {"f:spec": {"f:drainMode": {}}})), ago(50)),
    "set-twice": ((a_note(50, SETS), a_note(40, SETS)), ago(40)),
    "set-in-the-future": ((a_note(-9, SETS),), None),
    "without-a-time": (({"fieldsV1": SETS},), None),
    "odd-notes": ((a_note(5, None), a_note(5, {"f:spec": 7}), {"time": 7, "fieldsV1": SETS}), None),
    "none": ((), None),
}


@pytest.mark.parametrize(
    ("notes", "want"), [pytest.param(*row, id=name) for name, row in NOTES.items()]
)
def test_time_of_a_save_request_is_the_api_servers_or_when_it_was_first_seen(
    notes: Any, want: datetime | None
) -> None:
    world, key = World(), Key("team-a", "llama")
    record = slim_run(a_run(*notes))
    change: Change[RunRecord | None] = Change(type=ChangeType.ADDED, key=key, old=None, new=record)
    world.on_run(change)
    world.on_run(change)
    _, seen = world.saves_seen[key]
    facts = observe_run(world, DrainSettings(), key, NOW)
    assert facts is not None
    assert facts.save_asked_at == (want or seen)
    world.on_run(Change(type=ChangeType.DELETED, key=key, old=record, new=None))
    assert not world.saves_seen
