"""What a flusher does next: announce, copy, commit, or wait, each with its reason. Pure.

`loop` gathers the facts and carries the decisions out. Nothing here remembers anything: the queue
is worked out anew from what lies on both tiers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

from tidegate_contract.layout import Attempt
from tidegate_contract.seal import SaveReason
from tidegate_contract.wire import Policy, TrainerState
from tidegate_sidecar.turns import may_copy
from tidegate_sidecar.view import Key, RemoteView, StepView

_URGENT = frozenset({SaveReason.REQUEST, SaveReason.TERMINATION, SaveReason.CLOSE})
_OUTLIVED = timedelta(seconds=60)
COMMIT_DELAY_SECONDS = 2.0
"""The lead commits at once; who is not it steps in after this and a little more per rank."""
_COMMIT_DELAY_PER_RANK_SECONDS = 0.05
_MAX_COMMIT_DELAY_SECONDS = 30.0


class Why(StrEnum):
    """Why an attempt is in the queue."""

    URGENT = "Urgent"
    UNDER_WAY = "UnderWay"
    STARTED = "Started"
    SCHEDULED = "Scheduled"
    LAST = "Last"


_FIRST = {Why.URGENT: 0, Why.UNDER_WAY: 1}


class Waiting(StrEnum):
    """Why no copy is started."""

    NO_VIEW = "RemoteNotSeen"
    NOT_HOLDER = "AnotherFlushes"
    NOTHING = "NothingToCopy"
    NOT_ANNOUNCED = "NotAnnounced"
    TURN = "OthersTurn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that decisions are made from.

    Attributes:
        policy: live values.
        local: step folders on this node.
        states: rank → newest document of a trainer on this node.
        remote: as it was last seen; None before.
        holds_lock: this process is the node's flusher.
        is_lead: rank 0 is in this pod.
        is_finishing: the trainer is gone, or this is a single pass: nothing newer will come.
        refused: attempts set aside after a failure of their own.
        complete_seconds: attempt → how long all its receipts have been there, not committed.
        waited_seconds: since the remote tier last gained a receipt.
    """

    policy: Policy
    local: tuple[StepView, ...]
    states: Mapping[int, TrainerState] = field(default_factory=dict)
    remote: RemoteView | None = None
    holds_lock: bool = True
    is_lead: bool = False
    is_finishing: bool = False
    refused: frozenset[Attempt] = frozenset()
    complete_seconds: Mapping[Attempt, float] = field(default_factory=dict)
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """An attempt whose files of this node belong on the remote tier.

    Attributes:
        attempt: which.
        key: its place in the order of (lineage, step).
        why: what put it into the queue.
        mine: ranks sealed on this node.
        missing: those of them without a receipt.
        missing_bytes: of their files.
    """

    attempt: Attempt
    key: Key
    why: Why
    mine: frozenset[int]
    missing: frozenset[int]
    missing_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Copy these ranks' files of this attempt now."""

    attempt: Attempt
    ranks: frozenset[int]
    why: Why


def find_lead(states: Mapping[int, TrainerState]) -> TrainerState | None:
    """Rank 0's document, unless the others here outlived it: rank 0 is elsewhere now.

    Trainers of one node beat alike, by one clock.
    """
    first = states.get(0)
    newest = max((state.written_at for state in states.values()), default=None)
    if first is None or newest is None or newest - first.written_at > _OUTLIVED:
        return None
    return first


def find_lineage(states: Mapping[int, TrainerState]) -> int:
    """The lineage that the trainers here are in; 0 before they told."""
    return max((state.restore.lineage for state in states.values() if state.restore), default=0)


def decide_queue(facts: Facts) -> tuple[Queued, ...]:
    """What belongs on the remote tier and is not durable, first things first.

    Urgent attempts lead. Then come those that all nodes announced and some delivered: with saves
    that come faster than copies, nodes that each took the newest would never bring the same attempt
    to its end. Then the newest. Before the remote tier was seen it is all that is sealed.
    """
    remote = facts.remote or RemoteView()
    newest = remote.newest_key
    fresh = [
        (key, step)
        for step in facts.local
        if step.sealed
        and (key := remote.key(step)) is not None
        and (newest is None or key > newest)
        and step.attempt not in facts.refused
        and not _is_set_aside(remote, step.attempt)
    ]
    fresh.sort(key=lambda pair: pair[0], reverse=True)
    scheduled = _every_nth(remote, [key for key, _ in reversed(fresh)], facts.policy.remote_every)
    named = _named_by_answers(facts.states)
    queue: list[Queued] = []
    for key, step in fresh:
        why = _why(remote, step, key in scheduled, step.attempt in named)
        if why is None and facts.is_finishing and not queue:
            why = Why.LAST
        if why is not None:
            queue.append(_queued(remote, step, key, why))
    kept = _without_superseded(remote, queue)
    return tuple(sorted(kept, key=lambda item: _FIRST.get(item.why, 2)))  # else newest first


def _is_set_aside(remote: RemoteView, attempt: Attempt) -> bool:
    far = remote.find(attempt)
    return far is not None and far.is_in_trash


def _named_by_answers(states: Mapping[int, TrainerState]) -> frozenset[Attempt]:
    return frozenset(
        state.answer.attempt
        for state in states.values()
        if state.answer is not None and state.answer.attempt is not None
    )


def _every_nth(remote: RemoteView, oldest_first: list[Key], every: int) -> frozenset[Key]:
    """Counts from the newest attempt that is durable or that all announced: all nodes count alike.

    What only some announced is no base: the others may never have sealed it. Before the first base
    the oldest goes at once, so that a run soon has something durable.
    """
    bases = [
        key
        for far in remote.steps
        if (far.commit or far.is_announced_by_all) and (key := remote.key(far)) is not None
    ]
    if not bases:
        return frozenset(oldest_first[::every])
    base = max(bases)
    return frozenset([key for key in oldest_first if key > base][every - 1 :: every])


def _why(remote: RemoteView, step: StepView, is_scheduled: bool, is_named: bool) -> Why | None:
    far = remote.find(step.attempt)
    if is_named or step.reason in _URGENT:
        return Why.URGENT
    if far is not None and far.sealed and far.is_announced_by_all:
        return Why.UNDER_WAY
    if far is not None and (far.announced or far.sealed):
        return Why.STARTED
    return Why.SCHEDULED if is_scheduled else None


def _queued(remote: RemoteView, step: StepView, key: Key, why: Why) -> Queued:
    far = remote.find(step.attempt)
    missing = step.ranks - (far.ranks if far else frozenset())
    return Queued(
        attempt=step.attempt,
        key=key,
        why=why,
        mine=step.ranks,
        missing=missing,
        missing_bytes=sum(step.sealed[rank] for rank in missing),
    )


def _without_superseded(remote: RemoteView, queue: list[Queued]) -> list[Queued]:
    """Drops what an attempt that all ranks announced will soon make needless."""
    coming = [
        item.key
        for item in queue
        if (far := remote.find(item.attempt)) is not None and far.is_announced_by_all
    ]
    newest = max(coming, default=None)
    return [item for item in queue if newest is None or item.why in _FIRST or item.key >= newest]


def decide_announcement(facts: Facts, queue: tuple[Queued, ...]) -> Copy | None:
    """The ranks to announce now: of the first attempt that is not wholly on the remote tier."""
    if not facts.holds_lock or facts.remote is None:
        return None
    item = next((item for item in queue if item.missing), None)
    if item is None:
        return None
    far = facts.remote.find(item.attempt)
    silent = item.missing - (far.announced if far else frozenset())
    return Copy(attempt=item.attempt, ranks=silent, why=item.why) if silent else None


def decide_copy(facts: Facts, queue: tuple[Queued, ...]) -> Copy | Waiting:
    """What this node copies now, or why nothing."""
    if facts.remote is None:
        return Waiting.NO_VIEW
    if not facts.holds_lock:
        return Waiting.NOT_HOLDER
    due = [item for item in queue if item.missing]
    if not due:
        return Waiting.NOTHING
    item = _first_announced(facts.remote, due)
    far = facts.remote.find(item.attempt) if item is not None else None
    if item is None or far is None:
        return Waiting.NOT_ANNOUNCED
    is_turn = may_copy(
        item.mine,
        far.announced,
        far.ranks,
        nodes_at_once=facts.policy.nodes_at_once,
        waited_seconds=facts.waited_seconds,
    )
    if not is_turn:
        return Waiting.TURN
    return Copy(attempt=item.attempt, ranks=item.missing, why=item.why)


def _first_announced(remote: RemoteView, due: list[Queued]) -> Queued | None:
    """The first, once it is announced; until then the newest that all ranks announced.

    Else saves that come faster than looks would always find a newest one without announcement, and
    nothing would ever be copied. What is urgent is worth the wait.
    """
    for item in due:
        far = remote.find(item.attempt)
        is_announced = far is not None and item.missing <= far.announced
        if is_announced and far is not None and (item is due[0] or far.is_announced_by_all):
            return item
        if item.why is Why.URGENT:
            return None
    return None


def decide_interruption(facts: Facts, queue: tuple[Queued, ...], current: Copy) -> bool:
    """Whether the running copy stops: needless by a newer commit, or an urgent attempt waits.

    Giving way to everything newer would let saves that come faster than copies starve them all.
    """
    near = next((step for step in facts.local if step.attempt == current.attempt), None)
    newest = facts.remote.newest_key if facts.remote else None
    if facts.remote and near and newest and (facts.remote.key(near) or newest) < newest:
        return True
    first = next((item for item in queue if item.missing), None)
    return (
        first is not None
        and first.why is Why.URGENT
        and first.attempt != current.attempt
        and current.why is not Why.URGENT
    )


def decide_commit(facts: Facts) -> Attempt | None:
    """The newest attempt whose receipts are all there, once this process is to commit it."""
    remote = facts.remote
    if remote is None:
        return None
    complete = [
        (key, step)
        for step in remote.steps
        if step.is_complete
        and not step.commit
        and not step.is_in_trash
        and step.attempt not in facts.refused
        and (key := remote.key(step)) is not None
        and (remote.newest_key is None or key > remote.newest_key)
    ]
    if not complete:
        return None
    _, step = max(complete, key=lambda pair: pair[0])
    if facts.is_lead or facts.is_finishing:
        return step.attempt
    mine = [rank for near in facts.local if near.attempt == step.attempt for rank in near.sealed]
    lowest = min(mine, default=step.world_size)
    waited = facts.complete_seconds.get(step.attempt, 0.0)
    return step.attempt if waited >= _delay_seconds(lowest) else None


def _delay_seconds(lowest_rank: int) -> float:
    return min(
        COMMIT_DELAY_SECONDS + _COMMIT_DELAY_PER_RANK_SECONDS * lowest_rank,
        _MAX_COMMIT_DELAY_SECONDS,
    )


def is_done(facts: Facts, queue: tuple[Queued, ...]) -> bool:
    """Nothing is left that this process could do: all copied, and whatever is complete committed.

    An attempt that waits for other nodes' receipts is theirs: the last of them commits it. What
    another flusher of this node holds is that one's.
    """
    if not facts.holds_lock:
        return True
    if facts.remote is None:
        return not queue
    return not any(item.missing for item in queue) and decide_commit(facts) is None


def is_expected(facts: Facts, queue: tuple[Queued, ...]) -> bool:
    """Whether other nodes are about to make something durable that this one has delivered."""
    remote = facts.remote or RemoteView()
    return any(
        (far := remote.find(item.attempt)) is not None and far.is_announced_by_all for item in queue
    )


def look_interval_seconds(facts: Facts, queue: tuple[Queued, ...]) -> float:
    """How soon the remote tier is looked at again.

    While something is to become durable the lead looks each second and the others the less often,
    the more of them there are; else it is seldom, as each look costs the file system.
    """
    if facts.is_finishing:
        return 0.5
    if not queue:
        return 15.0 if facts.is_lead else 30.0
    if facts.is_lead:
        return 1.0
    lowest = min((min(item.mine) for item in queue if item.mine), default=0)
    return _delay_seconds(lowest)
