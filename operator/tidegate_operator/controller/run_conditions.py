"""The conditions of a run: Ready, Durable, Held, each with its reason. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from tidegate_contract.keys import (
    DrainState,
    DurableReason,
    HeldReason,
    ReleaseReason,
    RunCondition,
    RunReadyReason,
)
from tidegate_operator.api_run import CheckpointRun
from tidegate_operator.api_run_status import RunPhase, RunStatus
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.controller.conditions import Verdict
from tidegate_operator.controller.facts import RunFacts
from tidegate_operator.controller.pdb import BudgetDecision, BudgetReason

LAGGING_AFTER = timedelta(minutes=10)
"""A step that waits for its copy longer than this makes the run lag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What the conditions are derived from.

    Attributes:
        facts: of the run.
        run: its object.
        phase: decided in this pass.
        mode: how drains treat the run.
        budget: decided in this pass.
    """

    facts: RunFacts
    run: CheckpointRun
    phase: RunPhase
    mode: DrainMode
    budget: BudgetDecision


def decide_verdicts(view: RunView, now: datetime) -> Iterator[Verdict]:
    """Ready, Durable and Held as they are now.

    Args:
        view: of the run.
        now: aware UTC.
    """
    is_ready, ready, message = _ready(view)
    yield Verdict(type=RunCondition.READY, is_true=is_ready, reason=ready, message=message)
    is_durable, durable, message = _durable(view.run.status, now)
    yield Verdict(type=RunCondition.DURABLE, is_true=is_durable, reason=durable, message=message)
    is_held, held, message = _held(view)
    yield Verdict(type=RunCondition.HELD, is_true=is_held, reason=held, message=message)


def _ready(view: RunView) -> tuple[bool, RunReadyReason, str]:
    status = view.run.status
    missed = [pod.key.name for pod in view.facts.pods if pod.is_live and not pod.is_injected]
    if view.phase is RunPhase.FINISHED:
        return False, RunReadyReason.FINISHED, "the run's pods have succeeded"
    if missed:
        message = f"{len(missed)} pods run without the sidecar, the first is {missed[0]}"
        return False, RunReadyReason.NOT_INJECTED, message
    if view.phase is RunPhase.SILENT:
        return False, RunReadyReason.SILENT, "its pods run and none of them reports"
    saves = status.saves
    if saves is not None and saves.failed and saves.failed == saves.total:
        return False, RunReadyReason.SAVE_FAILING, "every save since the newest start has failed"
    if view.phase is not RunPhase.TRAINING:
        return False, RunReadyReason.NOT_STARTED, _NOT_STARTED[view.phase]
    return True, RunReadyReason.ON_SCHEDULE, "training goes on and saves succeed"


_NOT_STARTED = {
    RunPhase.PENDING: "no pod of the run runs yet",
    RunPhase.RESTORING: "its pods run and have not reported a step since they started",
    RunPhase.IDLE: "the run has no live pods",
}


def _durable(status: RunStatus, now: datetime) -> tuple[bool, DurableReason, str]:
    problem = next(iter(status.tier_problems), None)
    oldest = status.backlog.oldest_time if status.backlog else None
    if status.last_durable is None:
        return False, DurableReason.NEVER_SAVED, "no step has reached the remote tier"
    if problem is not None:
        message = f"node {problem.node} cannot use tier {problem.tier}: {problem.reason}"
        return False, DurableReason.STALLED, message
    if oldest is not None and now - oldest >= LAGGING_AFTER:
        message = f"a step sealed at {oldest:%Y-%m-%d %H:%M:%S} UTC still waits for its copy"
        return False, DurableReason.LAGGING, message
    return True, DurableReason.FRESH, "copies to the remote tier keep up with saves"


def _held(view: RunView) -> tuple[bool, HeldReason, str]:
    if view.facts.policy is None:
        return False, HeldReason.OFF, "the run's CheckpointPolicy is gone: saves go on, no hold"
    if view.mode is not DrainMode.ENFORCE:
        return False, HeldReason.OFF, f"drains are not enforced: the mode is {view.mode}"
    if view.budget.reason is BudgetReason.CONFLICT:
        return False, HeldReason.PDB_CONFLICT, view.budget.message
    if view.budget.reason is BudgetReason.DELETED_BY_HAND:
        return False, HeldReason.PDB_DELETED, view.budget.message
    if any(pod.is_held and pod.is_bound for pod in view.facts.pods):
        return True, HeldReason.HELD, "its pods leave once what they would lose is durable"
    return _let_go(view)


def _let_go(view: RunView) -> tuple[bool, HeldReason, str]:
    drains = view.run.status.drains
    let_go = [drain for drain in drains if drain.state in (DrainState.RELEASED, DrainState.EXPOSED)]
    if not let_go or not view.facts.live_pods:
        return False, HeldReason.IDLE, "no pod of the run is bound to a node and held"
    if all(drain.reason == ReleaseReason.SILENT for drain in let_go):
        return False, HeldReason.SILENT, "its pods were let go because they did not answer"
    names = ", ".join(sorted(drain.node for drain in let_go)[:3])
    return False, HeldReason.RELEASED, f"its pods on {names} may be evicted"
