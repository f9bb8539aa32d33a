from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_operator.api_run_status import RunPhase
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.controller.conditions import Verdict, build_conditions
from tidegate_operator.controller.facts import RunFacts
from tidegate_operator.controller.pdb import BudgetAction, BudgetDecision, BudgetReason
from tidegate_operator.controller.run_conditions import RunView, decide_verdicts
from tidegate_operator.kube.kinds import Key

Build = Callable[..., Any]
SAVED = {"lastDurable": {"step": 5, "time": "2026-11-29T11:59:00Z"}}


@pytest.fixture
def verdicts(now: datetime, a_run: Build, a_pod: Build, a_policy: Build) -> Build:
    """The verdicts of a run by type, as (is_true, reason)."""

    def build(
        status: dict[str, Any] | None = None,
        pods: list[dict[str, Any]] | None = None,
        phase: RunPhase = RunPhase.TRAINING,
        mode: DrainMode = DrainMode.ENFORCE,
        budget: BudgetReason = BudgetReason.HOLDING,
        has_policy: bool = True,
    ) -> dict[str, tuple[bool | None, str]]:
        run = a_run(**(status or {}))
        found = [{}] if pods is None else pods
        facts = RunFacts(
            key=Key("team-a", "llama"),
            run=run,
            pods=tuple(a_pod(f"pod-{index}", **over) for index, over in enumerate(found)),
            policy=a_policy() if has_policy else None,
        )
        decision = BudgetDecision(action=BudgetAction.KEEP, reason=budget, message="m")
        view = RunView(facts=facts, run=run, phase=phase, mode=mode, budget=decision)
        return {one.type: (one.is_true, one.reason) for one in decide_verdicts(view, now)}

    return build


@pytest.mark.parametrize(
    ("given", "want"),
    [
        pytest.param({}, (True, "OnSchedule"), id="training"),
        pytest.param({"phase": RunPhase.PENDING}, (False, "NotStarted"), id="pending"),
        pytest.param({"phase": RunPhase.RESTORING}, (False, "NotStarted"), id="restoring"),
        pytest.param({"phase": RunPhase.IDLE}, (False, "NotStarted"), id="idle"),
        pytest.param({"phase": RunPhase.SILENT}, (False, "Silent"), id="silent"),
        pytest.param({"phase": RunPhase.FINISHED}, (False, "Finished"), id="finished"),
        pytest.param({"pods": [{}, {"injected": False}]}, (False, "NotInjected"), id="one missed"),
        pytest.param(
            {"pods": [{}, {"injected": False, "phase": "Failed"}]},
            (True, "OnSchedule"),
            id="a missed pod that is over",
        ),
        pytest.param(
            {"status": {"saves": {"total": 3, "failed": 3}}}, (False, "SaveFailing"), id="all fail"
        ),
        pytest.param(
            {"status": {"saves": {"total": 3, "failed": 1}}}, (True, "OnSchedule"), id="one failed"
        ),
        pytest.param(
            {"status": {"saves": {"total": 0, "failed": 0}}}, (True, "OnSchedule"), id="no saves"
        ),
    ],
)
def test_ready_of_run(verdicts: Build, given: dict[str, Any], want: Any) -> None:
    assert verdicts(**given)["Ready"] == want


@pytest.mark.parametrize(
    ("status", "want"),
    [
        pytest.param({}, (False, "NeverSaved"), id="nothing durable"),
        pytest.param(SAVED, (True, "Fresh"), id="fresh"),
        pytest.param(
            {**SAVED, "backlog": {"oldestTime": "2026-11-29T11:50:01Z"}}, (True, "Fresh"), id="busy"
        ),
        pytest.param(
            {**SAVED, "backlog": {"oldestTime": "2026-11-29T11:50:00Z"}},
            (False, "Lagging"),
            id="lagging",
        ),
        pytest.param(
            {**SAVED, "tierProblems": [{"node": "n", "tier": "pfs", "reason": "Stalled"}]},
            (False, "Stalled"),
            id="tier stalled",
        ),
    ],
)
def test_durable_of_run(verdicts: Build, status: dict[str, Any], want: Any) -> None:
    assert verdicts(status=status)["Durable"] == want


FREE = {"labels": {keys.HOLD_LABEL: None}}
RELEASED = {"drains": [{"node": "node-1", "state": "Released", "reason": "Durable"}]}
GIVEN_UP = {"drains": [{"node": "node-1", "state": "Released", "reason": "Silent"}]}


@pytest.mark.parametrize(
    ("given", "want"),
    [
        pytest.param({}, (True, "Held"), id="held"),
        pytest.param({"pods": []}, (False, "Idle"), id="no pods"),
        pytest.param({"pods": [{"phase": "Pending", "node": ""}]}, (False, "Idle"), id="unbound"),
        pytest.param({"pods": [FREE], "status": RELEASED}, (False, "Released"), id="released"),
        pytest.param({"pods": [FREE], "status": GIVEN_UP}, (False, "Silent"), id="did not answer"),
        pytest.param({"pods": [{}, FREE], "status": RELEASED}, (True, "Held"), id="one of two"),
        pytest.param({"pods": [], "status": RELEASED}, (False, "Idle"), id="released and gone"),
        pytest.param({"mode": DrainMode.OFF}, (False, "Off"), id="off"),
        pytest.param({"mode": DrainMode.OBSERVE}, (False, "Off"), id="observed only"),
        pytest.param({"has_policy": False}, (False, "Off"), id="policy gone"),
        pytest.param({"budget": BudgetReason.CONFLICT}, (False, "PDBConflict"), id="conflict"),
        pytest.param(
            {"budget": BudgetReason.DELETED_BY_HAND}, (False, "PDBDeleted"), id="break-glass"
        ),
    ],
)
def test_held_of_run(verdicts: Build, given: dict[str, Any], want: Any) -> None:
    assert verdicts(**given)["Held"] == want


def test_conditions_keep_their_time_until_the_status_changes(
    now: datetime, ago: Callable[[float], datetime]
) -> None:
    def verdict(is_true: bool, reason: keys.DurableReason) -> Verdict:
        kind = keys.RunCondition.DURABLE
        return Verdict(type=kind, is_true=is_true, reason=reason, message="m")

    lagging = verdict(False, keys.DurableReason.LAGGING)
    first = build_conditions([], [lagging], 1, ago(60))
    stalled = verdict(False, keys.DurableReason.STALLED)
    (second,) = build_conditions(first, [stalled], 2, now)
    assert (second.reason, second.last_transition_time) == ("Stalled", ago(60))
    fresh = verdict(True, keys.DurableReason.FRESH)
    (third,) = build_conditions([second], [fresh], 2, now)
    assert (third.status, third.last_transition_time) == ("True", now)
