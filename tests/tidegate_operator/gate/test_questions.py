"""An idle trainer may have left a sealed step: the drain waits for its copy."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tidegate_contract.keys import DrainState
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import AnswerResult, Backlog, Phase, Report, SaveAnswer, StepNote
from tidegate_contract.wire import TrainerState as State
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.effective import HoldLimits
from tidegate_operator.gate.asks import request_id
from tidegate_operator.gate.facts import Drain, Durable, LeadReport, NodeFacts, PodFacts, RunFacts
from tidegate_operator.gate.hold import decide
from tidegate_operator.gate.observe import build_lead_report
from tidegate_operator.gate.world import TakenReport

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
RUN = "team-a/llama"
LIMITS = HoldLimits(
    max_hold=timedelta(minutes=10),
    freshness=timedelta(seconds=60),
    contact_timeout=timedelta(seconds=60),
    release_ttl=timedelta(minutes=3),
    blocks_at_deadline=False,
)
OLD, LAST = Attempt(step=100, nonce="0" * 16), Attempt(step=120, nonce="00000000000000aa")
IDLE = (Phase.FINISHED, Phase.RESTORING, Phase.STARTING, None)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def a_drain(state: DrainState, reason: str = "Evicted", requested: float = 100) -> Drain:
    at = ago(requested)
    return Drain(
        node="a",
        node_uid="uid-a",
        state=state,
        reason=reason,
        requested_at=at,
        deadline=at + LIMITS.max_hold,
    )


def a_durable(attempt: Attempt = OLD, age: float = 300) -> Durable:
    return Durable(step=attempt.step, nonce=attempt.nonce, at=ago(age))


def a_report(phase: Phase | None = Phase.FINISHED, **changes: Any) -> LeadReport:
    fields: dict[str, Any] = {"received_at": ago(1), "stated_at": ago(1), "step": 120}
    return LeadReport(phase=phase, **fields | changes)


def some_facts(*drains: Drain, report: LeadReport | None, **changes: Any) -> RunFacts:
    pod = PodFacts(
        name="p0",
        uid="uid-p0",
        node="a",
        is_running=True,
        is_over=False,
        is_terminating=False,
        has_hold=True,
    )
    fields: dict[str, Any] = {
        "name": RUN,
        "mode": DrainMode.ENFORCE,
        "limits": LIMITS,
        "drains": drains,
        "nodes": {"a": NodeFacts(name="a", uid="uid-a")},
        "pods": (pod,),
        "durable": a_durable(),
        "report": report,
        "last_report_at": ago(5),
    }
    return RunFacts(**fields | changes)


def state_of(facts: RunFacts) -> str:
    (drain,) = decide(facts, NOW).drains
    return f"{drain.state} {drain.reason}"


WAITS, SAVES = a_drain(DrainState.REQUESTED, requested=20), a_drain(DrainState.SAVING)
COPIES = a_drain(DrainState.FLUSHING, "SealedBefore")
NOTHING, COPYING, DURABLE = "Released NothingToLose", "Flushing SealedBefore", "Released Durable"
SEALED: dict[str, Any] = {"sealed": LAST, "sealed_at": ago(30)}
REPORTS: dict[str, tuple[dict[str, Any], Durable | None, str]] = {
    "nothing-sealed": ({}, a_durable(), NOTHING),
    "nothing-ever": ({}, None, NOTHING),
    "sealed-is-durable": (SEALED, a_durable(LAST), NOTHING),
    "sealed-not-durable": (SEALED, a_durable(), COPYING),
    "sealed-and-nothing-durable": (SEALED, None, COPYING),
    "backlog-of-a-trainer-before": ({"backlog_steps": 1}, a_durable(), COPYING),
    "backlog-behind-a-durable-one": (SEALED | {"backlog_steps": 1}, a_durable(LAST), COPYING),
    "a-higher-step-committed-since": (
        SEALED,
        a_durable(Attempt(step=150, nonce="b" * 16), 9),
        NOTHING,
    ),
    "a-higher-step-of-an-older-line": (
        SEALED,
        a_durable(Attempt(step=150, nonce="b" * 16), 99),
        COPYING,
    ),
}


@pytest.mark.parametrize("phase", IDLE, ids=str)
@pytest.mark.parametrize(
    ("report", "durable", "want"), [pytest.param(*row, id=name) for name, row in REPORTS.items()]
)
def test_drain_of_an_idle_trainer_waits_for_the_copy_of_what_it_sealed(
    phase: Phase | None, report: Any, durable: Durable | None, want: str
) -> None:
    for drain in (WAITS, SAVES):
        facts = some_facts(drain, report=a_report(phase, **report), durable=durable)
        assert state_of(facts) == want


def test_drain_of_a_run_that_never_reported_has_nothing_to_lose() -> None:
    assert state_of(some_facts(WAITS, report=None, last_report_at=None)) == NOTHING


def test_drain_with_an_idle_report_of_before_it_waits() -> None:
    report = a_report(received_at=ago(30), **SEALED)
    assert state_of(some_facts(WAITS, report=report)) == "Requested Evicted"


COPIED = a_durable(LAST, 2)
LEAVES: dict[str, tuple[Drain, LeadReport | None, Durable | None, str]] = {
    "still-copied": (COPIES, a_report(**SEALED, backlog_steps=1), a_durable(), COPYING),
    "committed": (COPIES, a_report(**SEALED), COPIED, DURABLE),
    "committed-and-an-older-one-waits": (
        COPIES,
        a_report(**SEALED, backlog_steps=1),
        COPIED,
        COPYING,
    ),
    "nothing-waits-any-more": (COPIES, a_report(), COPIED, DURABLE),
    "taken-back-and-nothing-durable": (COPIES, a_report(), None, NOTHING),
    "other-replica-hears-the-lead": (COPIES, None, COPIED, COPYING),
    "deadline": (
        a_drain(DrainState.FLUSHING, "SealedBefore", 600),
        a_report(**SEALED, backlog_steps=1),
        a_durable(),
        "Released DeadlineExceeded",
    ),
}


@pytest.mark.parametrize(
    ("drain", "report", "durable", "want"),
    [pytest.param(*row, id=name) for name, row in LEAVES.items()],
)
def test_drain_that_waits_for_a_copy_leaves_by_durable_or_its_deadline(
    drain: Drain, report: LeadReport | None, durable: Durable | None, want: str
) -> None:
    assert state_of(some_facts(drain, report=report, durable=durable)) == want


def test_drain_asks_for_a_save_once_its_trainer_trains_again() -> None:
    facts = some_facts(COPIES, report=a_report(Phase.TRAINING, step=130, backlog_steps=1))
    decision = decide(facts, NOW)
    (drain,) = decision.drains
    assert (drain.state, drain.requested_at) == (DrainState.REQUESTED, NOW)
    assert drain.deadline == COPIES.deadline
    assert decision.ask is not None
    assert decision.ask.request_id == request_id(RUN, NOW)
    assert decide(replace(facts, drains=(drain,)), NOW).drains == (drain,)


def test_answer_decides_which_attempt_a_drain_waits_for() -> None:
    answer = SaveAnswer(
        request_id=request_id(RUN, COPIES.requested_at),
        result=AnswerResult.SEALED,
        attempt=LAST,
    )
    report = a_report(answer=answer, **SEALED)
    assert state_of(some_facts(COPIES, report=report)) == "Flushing Sealed"
    assert state_of(some_facts(COPIES, report=report, durable=COPIED)) == DURABLE


def test_drain_that_waits_for_a_copy_is_settled() -> None:
    facts = some_facts(WAITS, report=a_report(**SEALED, backlog_steps=2))
    decision = decide(facts, NOW)
    settled = decide(replace(facts, drains=decision.drains), NOW)
    assert (settled.drains, settled.transitions, settled.ask) == (decision.drains, (), None)


def test_lead_report_tells_what_is_sealed_and_what_waits() -> None:
    state = State(
        run_id="r",
        rank=0,
        world_size=1,
        pod_uid="u",
        phase=Phase.FINISHED,
        progress=StepNote(step=120, tokens=1, at=ago(40)),
        sealed=StepNote(step=120, tokens=1, at=ago(30), attempt=LAST),
        written_at=ago(2),
    )
    report = Report(
        namespace="team-a",
        run="llama",
        pod="p0",
        pod_uid="u",
        run_id="r",
        state=state,
        backlog=Backlog(steps=2),
    )
    found = build_lead_report(TakenReport(report=report, received_at=NOW))
    assert (found.sealed, found.sealed_at, found.backlog_steps) == (LAST, ago(30), 2)
    bare = build_lead_report(TakenReport(report=replace(report, state=None), received_at=NOW))
    assert (bare.sealed, bare.sealed_at, bare.backlog_steps) == (None, None, 2)
