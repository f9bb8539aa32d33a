"""The hold's state machine: which node's pods may go, and why. Pure.

| state     | label | left when                                                        |
|-----------|-------|------------------------------------------------------------------|
| Held      | on    | eviction → Requested; drained for maxHold without one → Exposed  |
| Requested | on    | idle, fresh, silent → Released; acknowledged → Saving            |
|           |       | idle, but a sealed step is not durable yet → Flushing            |
| Saving    | on    | all ranks sealed → Flushing; failed twice → Released             |
| Flushing  | on    | committed, and status says so → Released                         |
|           |       | entered while idle, and the trainer goes on → Requested          |
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
from tidegate_contract.wire import Phase, SaveRequest
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.gate.asks import SAVED, answer_to, current_ask, is_final
from tidegate_operator.gate.facts import ACTIVE, Drain, NodeFacts, RunFacts
from tidegate_operator.gate.questions import (
    LEAD_IS_HERE,
    find_durable,
    find_idle,
    find_waiting,
    is_active_again,
    is_silent,
)

MOST_DRAINS = 32
"""What the schema of `status.drains` takes."""
KEPT_AFTER_GONE = timedelta(minutes=10)
REQUEST_AGAIN_AFTER = timedelta(seconds=30)
"""Drain clients try again every 5 to 10 s; a release must outlive that to be used."""

SEALED_BEFORE = "SealedBefore"
"""Why an idle trainer's drain is Flushing: no answer names the attempt that is awaited."""
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
    if durable := find_durable(facts, answer_to(facts, drain, drains)):
        return _release(drain, ReleaseReason.DURABLE, durable, now)
    moved = _follow_idle(facts, drain, now)
    if moved.state is not DrainState.RELEASED:
        moved = _follow_answer(facts, moved, drains, now)
    if moved.state is DrainState.RELEASED:
        return moved
    if now >= drain.deadline and not facts.limits.blocks_at_deadline:
        message = f"{moved.state} for {_span(drain.requested_at, now)}, the longest hold allowed"
        return _release(moved, ReleaseReason.DEADLINE_EXCEEDED, message, now)
    if moved.state is DrainState.REQUESTED and is_silent(facts, moved, drains, now):
        message = f"no answer of the trainer in {_seconds(facts.limits.contact_timeout)} s"
        return _release(moved, ReleaseReason.SILENT, message, now)
    return moved


def _follow_idle(facts: RunFacts, drain: Drain, now: datetime) -> Drain:
    """Follows a trainer that makes no steps now: what it sealed must still be copied."""
    is_flushing, since = drain.state is DrainState.FLUSHING, drain.requested_at
    if is_flushing and drain.reason != SEALED_BEFORE:
        # A step that was asked for is worth its copy even when its trainer has gone.
        return drain
    if idle := find_idle(facts, since):
        if is_flushing and facts.durable:
            message = f"step {facts.durable.step} is durable"
            return _release(drain, ReleaseReason.DURABLE, message, now)
        return _release(drain, ReleaseReason.NOTHING_TO_LOSE, idle, now)
    if is_flushing:
        return (
            _request_again(drain, "Resumed", now) if is_active_again(facts, since, now) else drain
        )
    waiting = find_waiting(facts, since)
    return _enter(drain, DrainState.FLUSHING, SEALED_BEFORE, waiting) if waiting else drain


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
        return _request_again(drain, "StepsBeyondFreshness", now)
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


def _request_again(drain: Drain, reason: str, now: datetime) -> Drain:
    return replace(
        drain,
        state=DrainState.REQUESTED,
        reason=reason,
        requested_at=now,
        released_at=None,
        message="training went on; waiting until the trainer begins a save",
    )


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
