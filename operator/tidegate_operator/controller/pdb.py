"""The hold's disruption budget: whether a run has one, and its minAvailable. Pure.

The budget is what holds while no gate answers. Two races shape the rules: it must count a pod
before the pod is Ready, or an eviction of a sibling slips through (measured); and it must not fall
while a drain lasts, as the budget's own status lags behind the labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from tidegate_contract import keys
from tidegate_operator.kube.kinds import Key

LOWER_AFTER = timedelta(seconds=60)
RECREATE_AFTER = timedelta(minutes=15)
"""Break-glass: a person who deletes the budget has this long to finish what they began."""
ALWAYS_ALLOW = "AlwaysAllow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A disruption budget of the namespace.

    Attributes:
        key: namespace and name.
        uid: of the object.
        run: name of the run when it is one of ours; else empty.
        selector: as stored; None selects nothing.
        min_available: as stored; None when maxUnavailable is used.
        eviction_policy: `unhealthyPodEvictionPolicy` as stored.
    """

    key: Key
    uid: str
    run: str = ""
    selector: Mapping[str, Any] | None = None
    min_available: int | str | None = None
    eviction_policy: str | None = None


class BudgetAction(StrEnum):
    """What to do with the run's budget."""

    KEEP = "Keep"
    CREATE = "Create"
    UPDATE = "Update"
    DELETE = "Delete"


class BudgetReason(StrEnum):
    """Why."""

    HOLDING = "Holding"
    NOTHING_TO_HOLD = "NothingToHold"
    POD_BOUND = "PodBound"
    CHANGED_BY_OTHERS = "ChangedByOthers"
    DRAINING = "Draining"
    SETTLING = "Settling"
    FEWER_PODS = "FewerPods"
    CONFLICT = "Conflict"
    DELETED_BY_HAND = "DeletedByHand"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFacts:
    """All that decides about one run's budget.

    Attributes:
        run: namespace and name of the run.
        held: pods to hold that are bound to a node and not terminal.
        live: pods of the run that are not terminal.
        current: the run's budget; None when there is none.
        rivals: names of other budgets that select a pod of the run.
        is_draining: whether a node of the run has an entry in `status.drains`.
        excess_since: since when `current` asks for more than `held`; None when it does not, or
            that is seen for the first time.
        deleted_at: when somebody else deleted the run's budget; None when nobody did.
    """

    run: Key
    held: int
    live: int
    current: Budget | None = None
    rivals: tuple[str, ...] = ()
    is_draining: bool = False
    excess_since: datetime | None = None
    deleted_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetDecision:
    """What to do, and why.

    Attributes:
        action: what to do.
        reason: why.
        min_available: of the budget after a create or update.
        message: the reason in a sentence with its numbers.
        excess_since: to be given back at the next decision.
        recheck_after: when time alone may change the decision; None when it cannot.
    """

    action: BudgetAction
    reason: BudgetReason
    min_available: int = 0
    message: str
    excess_since: datetime | None = None
    recheck_after: timedelta | None = None


def budget_name(run: str) -> str:
    """Name of the budget of a run, which is in the run's namespace."""
    return f"tidegate-{run}"


def build_selector(run: str) -> dict[str, Any]:
    """Which pods the budget of a run selects."""
    return {"matchLabels": {keys.HOLD_LABEL: keys.HOLD_VALUE, keys.RUN_LABEL: run}}


def decide_budget(facts: BudgetFacts, now: datetime) -> BudgetDecision:
    """What becomes of a run's budget.

    Args:
        facts: of the run.
        now: aware UTC.
    """
    if facts.rivals:
        return _conflict(facts)
    if facts.current is None:
        return _absent(facts, now)
    if not _is_sound(facts.current, facts.run.name):
        return _update(facts, BudgetReason.CHANGED_BY_OTHERS, "somebody else changed the hold PDB")
    if _minimum(facts.current) < facts.held:
        return _update(
            facts,
            BudgetReason.POD_BOUND,
            f"{facts.held} held pods are bound, {_minimum(facts.current)} were counted",
        )
    if _minimum(facts.current) > facts.held:
        return _excess(facts, now)
    return BudgetDecision(
        action=BudgetAction.KEEP,
        reason=BudgetReason.HOLDING,
        min_available=facts.held,
        message=f"{facts.held} pods are held",
    )


def _conflict(facts: BudgetFacts) -> BudgetDecision:
    # Two budgets that match one pod make every eviction of it fail with 500, and drains give up.
    rivals = ", ".join(facts.rivals)
    return BudgetDecision(
        action=BudgetAction.KEEP if facts.current is None else BudgetAction.DELETE,
        reason=BudgetReason.CONFLICT,
        message=f"PodDisruptionBudget {rivals} selects pods of this run; two would make every "
        "eviction fail, so only the webhook holds them",
    )


def _absent(facts: BudgetFacts, now: datetime) -> BudgetDecision:
    if not facts.held:
        return BudgetDecision(
            action=BudgetAction.KEEP,
            reason=BudgetReason.NOTHING_TO_HOLD,
            message="no held pod is bound to a node",
        )
    if facts.deleted_at is not None and now < facts.deleted_at + RECREATE_AFTER:
        again = facts.deleted_at + RECREATE_AFTER
        return BudgetDecision(
            action=BudgetAction.KEEP,
            reason=BudgetReason.DELETED_BY_HAND,
            message=f"the hold PDB was deleted by hand; it is made again at {again:%H:%M:%S} UTC",
            recheck_after=again - now,
        )
    return BudgetDecision(
        action=BudgetAction.CREATE,
        reason=BudgetReason.POD_BOUND,
        min_available=facts.held,
        message=f"{facts.held} held pods are bound",
    )


def _excess(facts: BudgetFacts, now: datetime) -> BudgetDecision:
    minimum = _minimum(facts.current)
    if facts.is_draining and facts.live:
        return BudgetDecision(
            action=BudgetAction.KEEP,
            reason=BudgetReason.DRAINING,
            min_available=minimum,
            message=f"{facts.held} pods are held; {minimum} stays until the drain is over",
            excess_since=now,
        )
    since = facts.excess_since or now
    if now < since + LOWER_AFTER:
        return BudgetDecision(
            action=BudgetAction.KEEP,
            reason=BudgetReason.SETTLING,
            min_available=minimum,
            message=f"{facts.held} pods are held; {minimum} stays for a moment",
            excess_since=since,
            recheck_after=since + LOWER_AFTER - now,
        )
    return BudgetDecision(
        action=BudgetAction.UPDATE if facts.held else BudgetAction.DELETE,
        reason=BudgetReason.FEWER_PODS if facts.held else BudgetReason.NOTHING_TO_HOLD,
        min_available=facts.held,
        message=f"{facts.held} pods are held, {minimum} were counted",
    )


def _update(facts: BudgetFacts, reason: BudgetReason, message: str) -> BudgetDecision:
    return BudgetDecision(
        action=BudgetAction.UPDATE,
        reason=reason,
        min_available=max(facts.held, _minimum(facts.current)),
        message=message,
        excess_since=facts.excess_since,
    )


def _is_sound(budget: Budget, run: str) -> bool:
    return (
        budget.selector == build_selector(run)
        and isinstance(budget.min_available, int)
        and budget.eviction_policy == ALWAYS_ALLOW
    )


def _minimum(budget: Budget | None) -> int:
    value = budget.min_available if budget else None
    return value if isinstance(value, int) else 0
