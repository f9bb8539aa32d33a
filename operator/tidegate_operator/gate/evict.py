"""What an eviction is answered. Pure: from memory, never from the API server.

A held pod is refused with 429 and a sentence for whoever drains the node; no Retry-After, which
would stall clients inside one call. Everything that is not ours, or cannot lose anything, passes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from tidegate_contract.keys import DrainState
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.effective import HoldLimits
from tidegate_operator.gate.facts import Drain, Eviction, PodFacts
from tidegate_operator.kube.times import format_time
from tidegate_operator.quantity import format_duration

TOO_MANY_REQUESTS = 429
MAX_USER = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRequest:
    """One review of `pods/eviction`.

    Attributes:
        uid: of the review.
        namespace, pod: names; the body may leave both out, the request never does.
        user: who evicts.
        is_dry_run: nothing may be recorded.
    """

    uid: str
    namespace: str
    pod: str
    user: str
    is_dry_run: bool


class Verdict(StrEnum):
    """Why an eviction passes or does not."""

    HELD = "Held"
    RELEASED = "Released"
    NOT_OURS = "NotOurs"
    NOT_RUNNING = "NotRunning"
    NOT_ENFORCED = "NotEnforced"
    NO_RUN = "NoRun"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionFacts:
    """What this replica knows of the pod.

    Attributes:
        pod: None when it is no injected pod, or not known.
        run: `namespace/name`; empty when the pod has none.
        is_known: whether a CheckpointRun of that name is known.
        mode: how drains treat the run.
        limits: of a hold; None when the run's policy is gone.
        drain: the entry of the pod's node; None for Held.
        pending: an eviction from this node that is not recorded yet; None for none.
        backlog: bytes that wait for their copy, as text; empty when not known.
    """

    pod: PodFacts | None = None
    run: str = ""
    is_known: bool = False
    mode: DrainMode = DrainMode.OFF
    limits: HoldLimits | None = None
    drain: Drain | None = None
    pending: Eviction | None = None
    backlog: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionAnswer:
    """The answer and what is to be remembered.

    Attributes:
        verdict: why.
        message: what the client prints when the eviction is refused.
        warning: what it prints although it passes; empty for nothing.
        eviction: to be recorded; None for nothing.
    """

    verdict: Verdict
    message: str = ""
    warning: str = ""
    eviction: Eviction | None = None


def parse_eviction(review: Mapping[str, Any]) -> EvictionRequest:
    """Reads a review; both API versions of Eviction look alike here.

    Raises:
        KeyError, TypeError, AttributeError: it is no AdmissionReview.
    """
    request = review["request"]
    body = request.get("object") or {}
    # `kubectl drain --dry-run=server` says it only inside the body.
    asked = [*((body.get("deleteOptions") or {}).get("dryRun") or ())]
    asked += (request.get("options") or {}).get("dryRun") or ()
    return EvictionRequest(
        uid=request["uid"],
        namespace=request["namespace"],
        pod=request["name"],
        user=str((request.get("userInfo") or {}).get("username") or "")[:MAX_USER],
        is_dry_run=bool(request.get("dryRun")) or "All" in asked,
    )


def decide_eviction(
    request: EvictionRequest, facts: EvictionFacts, now: datetime
) -> EvictionAnswer:
    """Whether the pod may go.

    Args:
        request: the eviction.
        facts: what is known of the pod.
        now: UTC.
    """
    passing = _passing(facts)
    if passing is not None or facts.pod is None or facts.limits is None:
        return passing or EvictionAnswer(verdict=Verdict.NOT_OURS)
    limits, drain = facts.limits, facts.drain
    if drain is None or drain.state is DrainState.EXPOSED:
        return _first(request, facts, limits, now)
    awaited = drain.message
    if drain.state is DrainState.FLUSHING and facts.backlog:
        awaited += f", {facts.backlog} left to copy"
    message = _message(facts, drain.state, awaited) + _until(limits, drain.deadline, now)
    return EvictionAnswer(verdict=Verdict.HELD, message=message)


def _passing(facts: EvictionFacts) -> EvictionAnswer | None:
    """The answer to an eviction that is none of ours; None when the pod may be held."""
    pod, drain = facts.pod, facts.drain
    if pod is None:
        return EvictionAnswer(verdict=Verdict.NOT_OURS)
    if not pod.is_running or pod.is_terminating:
        return EvictionAnswer(verdict=Verdict.NOT_RUNNING)
    if not facts.is_known:
        warning = f"no CheckpointRun {facts.run} is known: nothing was saved for this eviction"
        return EvictionAnswer(verdict=Verdict.NO_RUN, warning=warning)
    if facts.mode is not DrainMode.ENFORCE or facts.limits is None:
        return EvictionAnswer(verdict=Verdict.NOT_ENFORCED)
    is_released = drain is not None and drain.state is DrainState.RELEASED
    return EvictionAnswer(verdict=Verdict.RELEASED) if is_released else None


def _first(
    request: EvictionRequest, facts: EvictionFacts, limits: HoldLimits, now: datetime
) -> EvictionAnswer:
    """An eviction that nothing in status tells of yet."""
    node = facts.pod.node if facts.pod else ""
    if request.is_dry_run and facts.pending is None:
        return EvictionAnswer(verdict=Verdict.HELD, message=_rehearsal(facts, limits, node))
    eviction = facts.pending or Eviction(node=node, requested_by=request.user, at=now)
    message = _message(facts, DrainState.REQUESTED, "waiting until the trainer begins a save")
    message += _until(limits, eviction.at + limits.max_hold, now)
    recorded = None if request.is_dry_run else eviction
    return EvictionAnswer(verdict=Verdict.HELD, message=message, eviction=recorded)


def build_eviction_response(uid: str, answer: EvictionAnswer) -> dict[str, Any]:
    """The AdmissionReview of an answer; without a reason, so that no Retry-After is made of it."""
    is_held = answer.verdict is Verdict.HELD
    response: dict[str, Any] = {"uid": uid, "allowed": not is_held}
    if is_held:
        response["status"] = {"code": TOO_MANY_REQUESTS, "message": answer.message}
    if answer.warning:
        response["warnings"] = [answer.warning]
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _message(facts: EvictionFacts, state: str, awaited: str) -> str:
    node = facts.pod.node if facts.pod else ""
    return f"run {facts.run} is held on node {node}, state {state}: {awaited}"


def _until(limits: HoldLimits, deadline: datetime, now: datetime) -> str:
    if now < deadline:
        left = timedelta(seconds=round((deadline - now).total_seconds()))
        until = f"{format_time(deadline)} (in {format_duration(left)})"
    else:
        until = f"{format_time(deadline)}"
    if limits.blocks_at_deadline:
        return f"; expected by {until}, and held until it is done, as the policy demands"
    return f"; released at the latest at {until}"


def _rehearsal(facts: EvictionFacts, limits: HoldLimits, node: str) -> str:
    longest = format_duration(limits.max_hold)
    return (
        f"run {facts.run} is held on node {node}: an eviction would ask for a save and wait until "
        f"it is durable, at the latest {longest} after the first eviction"
    )
