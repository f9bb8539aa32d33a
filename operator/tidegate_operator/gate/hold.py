"""The hold's state machine: which node's pods may go, and why. Pure.

| state     | label | left when                                                        |
|-----------|-------|------------------------------------------------------------------|
| Held      | on    | eviction → Requested; drained for maxHold without one → Exposed  |
| Requested | on    | idle, fresh, silent → Released; acknowledged → Saving            |
| Saving    | on    | all ranks sealed → Flushing; failed twice → Released             |
| Flushing  | on    | committed, and status says so → Released                         |
| (these 3) | on    | no pod left, or the deadline → Released                          |
| Released  | off   | pods gone 10 min, drain given up → Held; stale → Requested       |
| Exposed   | off   | eviction → Requested; the node takes pods again → Held           |

Held is the absence of an entry. Either replica may write any transition that it can see; a replica
whose lead polls the other one sees no answers, so it moves only what status and time decide. The
deadline of an entry never moves later, so each drain ends. Called by `gate.clocks`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tidegate_contract.keys import DrainState, ReleaseReason
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import Phase, SaveAnswer, SaveRequest
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.gate.asks import (
    SAVED,
    accepted_ids,
    answer_to,
    current_ask,
    is_final,
)
from tidegate_operator.gate.facts import ACTIVE, Drain, LeadReport, NodeFacts, RunFacts

MOST_DRAINS = 32
"""What the schema of `status.drains` takes."""
KEPT_AFTER_GONE = timedelta(minutes=10)
REQUEST_AGAIN_AFTER = timedelta(seconds=30)
"""Drain clients try again every 5 to 10 s; a release must outlive that to be used."""

LEAD_IS_HERE = timedelta(seconds=30)
"""A lead whose newest report is older polls another replica now; polls last 20 s."""
PATIENCE_ELSEWHERE = timedelta(seconds=60)
"""`status.lastReportTime` of a run that reports to the other replica is never older than this."""

_IDLE_PHASES = frozenset({None, Phase.STARTING, Phase.RESTORING, Phase.FINISHED})
_REPEATABLE = frozenset({ReleaseReason.DURABLE, ReleaseReason.FRESH, ReleaseReason.NOTHING_TO_LOSE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One change of a node's state.

    Attributes:
        node: of the run's pods.
        old: None for Held.
        new: None for Held.
        reason: one CamelCase word.
        message: one sentence with the numbers.
    """

    node: str
    old: DrainState | None
    new: DrainState | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelChange:
    """A pod whose hold label must change.

    Attributes:
        pod, uid: of the pod.
        hold: whether it shall have the label.
    """

    pod: str
    uid: str
    hold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do for one run in this pass.

    Attributes:
        drains: all of `status.drains`, by node.
        transitions: what changed, for events and the log.
        labels: in force once `drains` is written.
        ask: the save that the lead should make now; None for none.
    """

    drains: tuple[Drain, ...]
    transitions: tuple[Transition, ...] = ()
    labels: tuple[LabelChange, ...] = ()
    ask: SaveRequest | None = None


def decide(facts: RunFacts, now: datetime) -> Decision:
    """Moves every node of a run as far as the facts allow.

    Args:
        facts: of the run.
        now: UTC.
    """
    observed = {drain.node: drain for drain in facts.drains}
    drains = _with_evictions(facts, observed, now)
    # What one drain's release says about another shows in the second round.
    for _ in range(3):
        drains = {node: moved for node, moved in _moved(facts, drains, now) if moved is not None}
    drains = _within_bounds(drains)
    entries = tuple(drains[node] for node in sorted(drains))
    return Decision(
        drains=entries,
        transitions=tuple(_transitions(observed, drains)),
        labels=tuple(_labels(facts, observed, drains)),
        ask=current_ask(facts, entries, now),
    )


def wants_hold(facts: RunFacts, node: str, drains: Mapping[str, Drain]) -> bool:
    """Whether the pods of the run on a node shall carry the hold label.

    Args:
        facts: of the run.
        node: empty for pods that are not bound.
        drains: entries by node.
    """
    if facts.mode is not DrainMode.ENFORCE or facts.is_conflicted:
        return False
    return node not in drains or drains[node].state in ACTIVE


def _with_evictions(
    facts: RunFacts, observed: Mapping[str, Drain], now: datetime
) -> dict[str, Drain]:
    drains = {node: drain for node, drain in observed.items() if _is_same_node(facts, drain)}
    if facts.mode is not DrainMode.ENFORCE:
        return drains
    for node, eviction in facts.evictions.items():
        if node not in drains or drains[node].state is DrainState.EXPOSED:
            drains[node] = Drain(
                node=node,
                node_uid=facts.nodes[node].uid if node in facts.nodes else "",
                state=DrainState.REQUESTED,
                reason="Evicted",
                requested_by=eviction.requested_by,
                requested_at=eviction.at,
                deadline=eviction.at + facts.limits.max_hold,
                message="waiting until the trainer begins a save",
            )
    for name, found in facts.nodes.items():
        if name not in drains and (exposed := _exposed(facts, found, now)):
            drains[name] = exposed
    return drains


def _is_same_node(facts: RunFacts, drain: Drain) -> bool:
    node = facts.nodes.get(drain.node)
    return node is None or not drain.node_uid or node.uid == drain.node_uid


def _exposed(facts: RunFacts, node: NodeFacts, now: datetime) -> Drain | None:
    since = node.draining_since
    if since is None or now < since + facts.limits.max_hold or not facts.stays_on(node.name):
        return None
    return Drain(
        node=node.name,
        node_uid=node.uid,
        state=DrainState.EXPOSED,
        reason="NoEviction",
        requested_at=since,
        deadline=since + facts.limits.max_hold,
        message="the node is drained and no eviction came: only the webhook holds its pods",
    )


def _moved(
    facts: RunFacts, drains: Mapping[str, Drain], now: datetime
) -> Iterator[tuple[str, Drain | None]]:
    entries = tuple(drains.values())
    for node, drain in drains.items():
        match drain.state:
            case DrainState.RELEASED:
                yield node, _after_release(facts, drain, now)
            case DrainState.EXPOSED:
                yield node, _while_exposed(facts, drain)
            case _:
                limit = drain.requested_at + facts.limits.max_hold
                earlier = replace(drain, deadline=min(drain.deadline, limit))
                yield node, _advance(facts, earlier, entries, now)


def _advance(facts: RunFacts, drain: Drain, drains: Sequence[Drain], now: datetime) -> Drain:
    """One of the three states in which something is awaited."""
    if not facts.stays_on(drain.node):
        message = "no pod of the run is left on the node"
        return _release(drain, ReleaseReason.NOTHING_TO_LOSE, message, now)
    if facts.mode is not DrainMode.ENFORCE:
        return _release(drain, ReleaseReason.OFF, "drains of this run are not enforced", now)
    if durable := _answered_durably(facts, answer_to(facts, drain, drains)):
        return _release(drain, ReleaseReason.DURABLE, durable, now)
    # A sealed step is worth its copy even when its trainer has gone.
    is_flushing = drain.state is DrainState.FLUSHING
    if not is_flushing and (idle := _idle(facts, drain.requested_at)):
        return _release(drain, ReleaseReason.NOTHING_TO_LOSE, idle, now)
    moved = _follow_answer(facts, drain, drains, now)
    if moved.state is DrainState.RELEASED:
        return moved
    if now >= drain.deadline and not facts.limits.blocks_at_deadline:
        message = f"{moved.state} for {_span(drain.requested_at, now)}, the longest hold allowed"
        return _release(moved, ReleaseReason.DEADLINE_EXCEEDED, message, now)
    if moved.state is DrainState.REQUESTED and _is_silent(facts, moved, drains, now):
        message = f"no answer of the trainer in {_seconds(facts.limits.contact_timeout)} s"
        return _release(moved, ReleaseReason.SILENT, message, now)
    return moved


def _follow_answer(facts: RunFacts, drain: Drain, drains: Sequence[Drain], now: datetime) -> Drain:
    if drain.state is DrainState.REQUESTED and facts.durable and facts.is_fresh(now):
        age = _span(facts.durable.at, now)
        message = f"step {facts.durable.step} is durable since {age}"
        return _release(drain, ReleaseReason.FRESH, message, now)
    answer = answer_to(facts, drain, drains)
    if answer is None:
        return drain
    if not is_final(answer):
        is_new = drain.state is DrainState.REQUESTED
        return (
            _enter(drain, DrainState.SAVING, "Acknowledged", "all ranks save") if is_new else drain
        )
    if answer.result not in SAVED:
        message = f"the save failed {answer.failures} times"
        return _release(drain, ReleaseReason.SAVE_FAILED, message, now)
    if answer.attempt is None:
        message = "the trainer has nothing to save"
        return _release(drain, ReleaseReason.NOTHING_TO_LOSE, message, now)
    return _after_seal(facts, drain, answer.attempt, now)


def _answered_durably(facts: RunFacts, answer: SaveAnswer | None) -> str:
    """A sentence once the asked save is committed; a commit proves the seals nobody told of yet."""
    durable = facts.durable
    if answer is None or answer.attempt is None or durable is None:
        return ""
    return f"step {durable.step} is durable" if durable.is_attempt(answer.attempt) else ""


def _after_seal(facts: RunFacts, drain: Drain, attempt: Attempt, now: datetime) -> Drain:
    durable = facts.durable
    if durable is not None and (
        durable.is_attempt(attempt)
        or (durable.at >= drain.requested_at and durable.step >= attempt.step)
    ):
        message = f"step {durable.step} is durable"
        return _release(drain, ReleaseReason.DURABLE, message, now)
    message = f"step {attempt.step} is sealed and is copied to the remote tier"
    return _enter(drain, DrainState.FLUSHING, "Sealed", message)


def _idle(facts: RunFacts, since: datetime) -> str:
    """Why the run has nothing to lose, as a sentence; empty when it has, or when nobody knows."""
    report, durable = facts.report, facts.durable
    if report is None:
        return "" if facts.last_report_at else "no trainer of this run has reported yet"
    # An older report tells of a moment before the eviction; the request itself brings a new one.
    if report.received_at <= since:
        return ""
    if report.phase in _IDLE_PHASES:
        return f"the trainer is {report.phase.lower()}" if report.phase else "no trainer runs"
    # The state that a report carries may be seconds old, and a trainer goes on meanwhile.
    is_current = report.stated_at is not None and report.stated_at > since
    is_all_durable = durable is not None and report.step == durable.step
    if durable and is_current and is_all_durable and _is_same_line(report, facts):
        return f"step {durable.step} is the newest and is durable"
    return ""


def _is_same_line(report: LeadReport, facts: RunFacts) -> bool:
    """Whether the durable step belongs to this trainer's line, not to one it rolled back from."""
    durable = facts.durable
    if durable is None or report.restored_at is None or durable.at >= report.restored_at:
        return True
    return report.restored is not None and durable.is_attempt(report.restored)


def _is_silent(facts: RunFacts, drain: Drain, drains: Sequence[Drain], now: datetime) -> bool:
    timeout = facts.limits.contact_timeout
    turns = [one.released_at for one in drains if one.released_at and one.node != drain.node]
    if now - max([drain.requested_at, *turns]) < timeout:
        return False
    report = facts.report
    if report is not None and now - report.received_at < LEAD_IS_HERE:
        ask = current_ask(facts, drains, now)
        return ask is not None and ask.request_id in accepted_ids(facts, drain, drains)
    # The lead may poll the other replica, which then sees its answers and writes now and then.
    patience = max(timeout, PATIENCE_ELSEWHERE)
    return facts.last_report_at is None or now - facts.last_report_at >= patience


def _after_release(facts: RunFacts, drain: Drain, now: datetime) -> Drain | None:
    node = facts.nodes.get(drain.node)
    is_draining = node is not None and node.draining_since is not None
    since = now - (drain.released_at or drain.requested_at)
    if not facts.stays_on(drain.node):
        return None if since >= KEPT_AFTER_GONE else drain
    if not is_draining:
        is_leaving = any(pod.node == drain.node and pod.is_terminating for pod in facts.pods)
        is_given_up = since >= facts.limits.release_ttl and not is_leaving
        return None if is_given_up else drain
    if facts.mode is DrainMode.ENFORCE and _is_stale(facts, drain, now):
        return replace(
            drain,
            state=DrainState.REQUESTED,
            reason="StepsBeyondFreshness",
            requested_at=now,
            released_at=None,
            message="training went on after the release; waiting until the trainer begins a save",
        )
    return drain


def _is_stale(facts: RunFacts, drain: Drain, now: datetime) -> bool:
    """Whether the run has trained on so far that its release no longer covers the loss."""
    report, durable = facts.report, facts.durable
    if drain.reason not in _REPEATABLE or now >= drain.deadline or report is None:
        return False
    if now - (drain.released_at or now) < max(REQUEST_AGAIN_AFTER, facts.limits.freshness):
        return False
    is_training = report.phase is Phase.TRAINING and report.step is not None
    if not is_training or now - report.received_at >= LEAD_IS_HERE:
        return False
    return durable is None or (report.step != durable.step and not facts.is_fresh(now))


def _while_exposed(facts: RunFacts, drain: Drain) -> Drain | None:
    node = facts.nodes.get(drain.node)
    is_draining = node is not None and node.draining_since is not None
    is_held = facts.mode is DrainMode.ENFORCE and facts.stays_on(drain.node)
    return drain if is_draining and is_held else None


def _enter(drain: Drain, state: DrainState, reason: str, message: str) -> Drain:
    return replace(drain, state=state, reason=reason, message=message)


def _release(drain: Drain, reason: ReleaseReason, message: str, now: datetime) -> Drain:
    return replace(
        drain, state=DrainState.RELEASED, reason=reason, message=message, released_at=now
    )


def _within_bounds(drains: dict[str, Drain]) -> dict[str, Drain]:
    if len(drains) <= MOST_DRAINS:
        return drains
    # Whatever waits comes first, the longest waiting ahead; then the newest releases.
    waiting = [one for one in drains.values() if one.state is not DrainState.RELEASED]
    waiting.sort(key=lambda one: one.requested_at)
    released = [one for one in drains.values() if one.state is DrainState.RELEASED]
    released.sort(key=lambda one: one.released_at or one.requested_at, reverse=True)
    return {one.node: one for one in (waiting + released)[:MOST_DRAINS]}


def _transitions(
    observed: Mapping[str, Drain], drains: Mapping[str, Drain]
) -> Iterator[Transition]:
    for node in sorted(observed.keys() | drains.keys()):
        old, new = observed.get(node), drains.get(node)
        old_state, new_state = old.state if old else None, new.state if new else None
        if old_state is not new_state:
            yield Transition(
                node=node,
                old=old_state,
                new=new_state,
                reason=new.reason if new else "Held",
                message=new.message if new else "the node's pods are held again",
            )


def _labels(
    facts: RunFacts, observed: Mapping[str, Drain], drains: Mapping[str, Drain]
) -> Iterator[LabelChange]:
    for pod in facts.pods:
        if not pod.stays:
            continue
        hold = wants_hold(facts, pod.node, drains)
        # A hold comes back one pass after status says so: the budget must be raised first, or it
        # has one pod too many and lets another one go.
        is_settled = wants_hold(facts, pod.node, observed) == hold
        if pod.has_hold != hold and (is_settled or not hold):
            yield LabelChange(pod=pod.name, uid=pod.uid, hold=hold)


def _seconds(span: timedelta) -> int:
    return int(span.total_seconds())


def _span(start: datetime, end: datetime) -> str:
    return f"{max(_seconds(end - start), 0)} s"
