"""What becomes of a run: its object, its budget's facts, the controller's part of its status. Pure.

Owns the status fields phase, drain, pods and tiers, and the node annotation; the run's conditions
are `controller.run_conditions`. Called by `controller.reconcile`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from tidegate_contract.errors import Reject
from tidegate_contract.keys import DrainState, HeldReason, RunCondition
from tidegate_operator.api_run import RunDrainMode
from tidegate_operator.api_run_status import NodeDrain, RunPhase, RunPods, RunStatus, RunTiers
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.controller.conditions import build_conditions
from tidegate_operator.controller.facts import Pod, RunFacts, RunNote
from tidegate_operator.controller.pdb import BudgetDecision, BudgetFacts, budget_name
from tidegate_operator.controller.run_conditions import RunView, decide_verdicts
from tidegate_operator.effective import build_run_tiers, decide_mode, find_places
from tidegate_operator.gate.facts import ACTIVE
from tidegate_operator.kube.kinds import Key
from tidegate_operator.kube.selector import matches
from tidegate_operator.kube.times import format_time
from tidegate_operator.settings import Settings

NEVER = "never"
"""Node annotation of a node with a run that has nothing durable yet."""

SILENT_CONTACTS = 3
"""A run is silent once so many of the gate's contact timeouts passed without a report."""

OWNED_RUN_FIELDS = frozenset(
    {"observedGeneration", "policyGeneration", "tiers", "phase", "drain", "pods", "conditions"}
)
"""Status fields that the controller, and nobody else, writes."""

_COLUMN_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusDecision:
    """The controller's part of a run's status.

    Attributes:
        status: all of that part.
        recheck_after: when time alone may change it; None when it cannot.
    """

    status: RunStatus
    recheck_after: timedelta | None = None


def decide_policy(facts: RunFacts) -> Key | None:
    """The policy that a run's spec names, else its last pod's; None without either."""
    if facts.run is not None and facts.run.spec.policy_name:
        return Key(facts.key.namespace, facts.run.spec.policy_name)
    pods = [pod for pod in facts.pods if pod.is_injected] or facts.pods
    return pods[-1].policy if pods else None


def decide_creation(facts: RunFacts) -> Pod | None:
    """The pod whose run must be created now; None when there is a run, or no live injected pod."""
    return facts.live_pods[0] if facts.run is None and facts.live_pods else None


def decide_run_mode(facts: RunFacts, settings: Settings) -> DrainMode:
    """How drains treat the run; Off when its policy is gone."""
    if facts.policy is None:
        return DrainMode.OFF
    run_mode = facts.run.spec.drain_mode if facts.run else RunDrainMode.INHERIT
    return decide_mode(facts.policy.spec.drain, run_mode, settings.drain)


def build_budget_facts(
    facts: RunFacts,
    settings: Settings,
    *,
    excess_since: datetime | None,
    deleted_at: datetime | None,
) -> BudgetFacts:
    """What `pdb.decide_budget` looks at.

    Args:
        facts: of the run.
        settings: of the installation.
        excess_since: what the decision before gave.
        deleted_at: when somebody else deleted the budget, as far as this process saw it.
    """
    name = Key(facts.key.namespace, budget_name(facts.key.name))
    drains = facts.run.status.drains if facts.run else ()
    released = {drain.node for drain in drains if drain.state not in ACTIVE}
    is_enforced = decide_run_mode(facts, settings) is DrainMode.ENFORCE
    live = [pod for pod in facts.pods if pod.is_live]
    return BudgetFacts(
        run=facts.key,
        held=sum(_counts(pod, released, is_enforced) for pod in live),
        live=len(live),
        current=next((one for one in facts.budgets if one.key == name), None),
        rivals=tuple(
            one.key.name
            for one in facts.budgets
            if one.key != name and any(matches(one.selector, pod.labels) for pod in live)
        ),
        is_draining=bool(drains),
        excess_since=excess_since,
        deleted_at=deleted_at or _noted_deletion(facts),
    )


def _counts(pod: Pod, released: set[str], is_enforced: bool) -> bool:
    """Whether the budget counts a live pod.

    A pod that shall be held again has no label yet: the gate sets it once the budget counts it.
    """
    if not pod.is_bound or not pod.is_injected:
        return False
    return pod.is_held or (is_enforced and not pod.is_terminating and pod.node not in released)


def _noted_deletion(facts: RunFacts) -> datetime | None:
    """When the budget was deleted by hand, as the controller before this one noted it."""
    for condition in facts.run.status.conditions if facts.run else ():
        if condition.type == RunCondition.HELD and condition.reason == HeldReason.PDB_DELETED:
            return condition.last_transition_time
    return None


def decide_run_status(
    facts: RunFacts, budget: BudgetDecision, settings: Settings, now: datetime
) -> StatusDecision:
    """The controller's part of a run's status.

    Args:
        facts: of the run, whose object exists.
        budget: what was decided about its budget.
        settings: of the installation.
        now: aware UTC.
    """
    run = facts.run
    if run is None:
        raise ValueError("a run without an object has no status")
    silent_after = settings.drain.contact_timeout * SILENT_CONTACTS
    mode = decide_run_mode(facts, settings)
    phase = decide_phase(facts, silent_after, now)
    view = RunView(facts=facts, run=run, phase=phase, mode=mode, budget=budget)
    held = sum(pod.is_held and pod.is_bound for pod in facts.pods)
    generation = run.metadata.generation
    status = RunStatus(
        observed_generation=generation,
        policy_generation=(
            facts.policy.metadata.generation if facts.policy else run.status.policy_generation
        ),
        tiers=_tiers(facts, settings),
        phase=phase,
        drain=describe_drains(run.status.drains, held, mode),
        pods=RunPods(
            running=sum(pod.is_running for pod in facts.pods),
            injected=len(facts.live_pods),
            held=held,
        ),
        conditions=build_conditions(
            run.status.conditions, decide_verdicts(view, now), generation, now
        ),
    )
    return StatusDecision(status=status, recheck_after=_recheck(facts, phase, silent_after, now))


def decide_phase(facts: RunFacts, silent_after: timedelta, now: datetime) -> RunPhase:
    """What a run does now, for people.

    Args:
        facts: of the run, whose object exists.
        silent_after: time without a report after which a run with running pods is silent.
        now: aware UTC.
    """
    status = facts.run.status if facts.run else RunStatus()
    live = facts.live_pods
    if not live:
        return _phase_without_pods(facts, status)
    running = [pod for pod in live if pod.is_running]
    if not running:
        return RunPhase.PENDING
    heard = max(filter(None, [status.last_report_time, _newest_start(running)]), default=now)
    if now - heard >= silent_after:
        return RunPhase.SILENT
    began, progress = _newest_start(running), status.progress
    if progress is None or progress.time is None or (began and progress.time < began):
        return RunPhase.RESTORING
    return RunPhase.TRAINING


def _phase_without_pods(facts: RunFacts, status: RunStatus) -> RunPhase:
    is_over = any(pod.phase == "Succeeded" for pod in facts.pods)
    if is_over or (status.phase is RunPhase.FINISHED and not facts.pods):
        return RunPhase.FINISHED
    return RunPhase.PENDING if status.progress is None else RunPhase.IDLE


def _newest_start(pods: Iterable[Pod]) -> datetime | None:
    return max((pod.started for pod in pods if pod.started), default=None)


def _recheck(
    facts: RunFacts, phase: RunPhase, silent_after: timedelta, now: datetime
) -> timedelta | None:
    if phase not in (RunPhase.TRAINING, RunPhase.RESTORING):
        return None
    status = facts.run.status if facts.run else RunStatus()
    running = [pod for pod in facts.live_pods if pod.is_running]
    heard = max(filter(None, [status.last_report_time, _newest_start(running)]), default=now)
    return heard + silent_after - now


def describe_drains(drains: tuple[NodeDrain, ...], held: int, mode: DrainMode) -> str | None:
    """The text of the column DRAIN; None where there is nothing to say.

    Args:
        drains: of the run.
        held: its pods that carry the hold label and are bound.
        mode: how drains treat the run.
    """
    active = [drain for drain in drains if drain.state is not DrainState.RELEASED]
    if active:
        return _describe_nodes(active)
    if held:
        return "Held"
    if mode is not DrainMode.ENFORCE:
        return "Off"
    return _describe_nodes(drains) if drains else None


_LEAST_ADVANCED_FIRST = (
    DrainState.REQUESTED,
    DrainState.SAVING,
    DrainState.FLUSHING,
    DrainState.EXPOSED,
    DrainState.RELEASED,
)


def _describe_nodes(drains: Iterable[NodeDrain]) -> str:
    found = tuple(drains)
    state = min((drain.state for drain in found), key=_LEAST_ADVANCED_FIRST.index)
    if len(found) > 1:
        return f"{len(found)} nodes {state}"
    return f"{found[0].node[: _COLUMN_WIDTH - len(state) - 1]} {state}"


def _tiers(facts: RunFacts, settings: Settings) -> RunTiers | None:
    """What was pinned at the first pod stays, whatever the policy says since."""
    pinned = facts.run.status.tiers if facts.run else None
    if pinned is not None or facts.policy is None or not facts.live_pods:
        return pinned
    try:
        return build_run_tiers(find_places(facts.policy, facts.key.name, settings.tiers))
    except Reject:
        # The policy's own condition says which tier is unknown.
        return None


def decide_last_durable(runs: Iterable[RunNote]) -> str | None:
    """The annotation of a node: what it would cost at most to lose it.

    Args:
        runs: that have a live pod on the node.

    Returns:
        The oldest of their newest durable times, RFC 3339; `NEVER` when one of them has none; None
        without runs.
    """
    times = [run.durable_time for run in runs]
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        return NEVER
    return format_time(min(known)) if known else None
