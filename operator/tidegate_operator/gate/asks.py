"""Which save a run is asked for now. Pure.

One save at a time: the ask in flight is finished before another is handed out, and triggers within
`GROUP_WINDOW` share one. An ask that no save answers in time stands in nobody's way. Its deadline
is fixed by its trigger. An ask's id follows from the run and its trigger alone, so both replicas
hand out the same one. Called by `gate.hold`.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta

from tidegate_contract.keys import DrainState
from tidegate_contract.wire import AnswerResult, SaveAnswer, SaveRequest
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.gate.facts import ACTIVE, Drain, RunFacts

GROUP_WINDOW = timedelta(seconds=10)
FAILURES_TO_GIVE_UP = 2
SAVED = frozenset({AnswerResult.SEALED, AnswerResult.NOTHING_NEW})
"""Answers after which the newest sealed step holds what was asked for."""


def request_id(run: str, trigger: datetime | str) -> int:
    """The id of the save that a trigger asks for, 1 … 2^63-1.

    Args:
        run: `namespace/name`.
        trigger: UTC of an eviction or a cordon, or the value of `spec.saveRequest`.
    """
    text = trigger if isinstance(trigger, str) else trigger.isoformat()
    digest = hashlib.sha256(f"{type(trigger).__name__}/{run}/{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1 or 1


def is_final(answer: SaveAnswer) -> bool:
    """Whether no more becomes of the request that is answered."""
    return answer.result in SAVED or answer.failures >= FAILURES_TO_GIVE_UP


def group_start(drain: Drain, drains: Sequence[Drain]) -> datetime:
    """When the first drain of this one's group was requested."""
    start = drain.requested_at
    for other in drains:
        lead = drain.requested_at - other.requested_at
        if other.state is not DrainState.EXPOSED and timedelta(0) <= lead <= GROUP_WINDOW:
            start = min(start, other.requested_at)
    return start


def answer_to(facts: RunFacts, drain: Drain, drains: Sequence[Drain]) -> SaveAnswer | None:
    """What the lead answered to the save that this drain waits for; None before."""
    answer = facts.report.answer if facts.report else None
    if answer is None or answer.request_id not in accepted_ids(facts, drain, drains):
        return None
    return answer


def current_ask(facts: RunFacts, drains: Sequence[Drain], now: datetime) -> SaveRequest | None:
    """The save that the lead should make now; None when there is none.

    Args:
        facts: of the run.
        drains: as decided in this pass.
        now: UTC.
    """
    others = [ask for ask in (_by_spec(facts, now), _by_cordon(facts, now)) if ask]
    others = [ask for ask in others if not _is_done(facts, ask)]
    for ask in others:
        if _is_in_flight(facts, ask, now):
            return ask
    waiting = [drain for drain in drains if drain.state in ACTIVE]
    if not waiting:
        return next(iter(others), None)
    # Later groups wait for the oldest: once its step is durable, it is fresh enough for them too.
    oldest = min(waiting, key=lambda drain: (drain.requested_at, drain.node))
    return _by_drain(facts, oldest, drains)


def accepted_ids(facts: RunFacts, drain: Drain, drains: Sequence[Drain]) -> frozenset[int]:
    """Ids of the saves that answer a drain: its group's, and an early one for a cordon just before.

    Args:
        facts: of the run.
        drain: an entry.
        drains: all entries of the run.
    """
    start = group_start(drain, drains)
    early = (node.draining_since for node in facts.nodes.values() if node.draining_since)
    near = [moment for moment in early if timedelta(0) <= start - moment <= GROUP_WINDOW]
    return frozenset(request_id(facts.name, moment) for moment in (start, *near))


def spec_turn_end(facts: RunFacts) -> datetime | None:
    """UTC until which a drain waits for the save that `spec.saveRequest` asks for; None for none.

    One that the trainer has begun by then goes on.
    """
    if not facts.save_value or facts.save_asked_at is None:
        return None
    return facts.save_asked_at + facts.limits.contact_timeout


def _is_in_flight(facts: RunFacts, ask: SaveRequest, now: datetime) -> bool:
    """Whether the lead has the ask and, in time, has begun its save."""
    report = facts.report
    if report is None or report.known_request_id != ask.request_id:
        return False
    is_begun = report.answer is not None and report.answer.request_id == ask.request_id
    asked_at = ask.deadline - facts.limits.max_hold
    return is_begun or now < asked_at + facts.limits.contact_timeout


def _is_done(facts: RunFacts, ask: SaveRequest) -> bool:
    answer = facts.report.answer if facts.report else None
    return answer is not None and answer.request_id == ask.request_id and is_final(answer)


def _by_drain(facts: RunFacts, drain: Drain, drains: Sequence[Drain]) -> SaveRequest | None:
    answer = answer_to(facts, drain, drains)
    if drain.state is DrainState.FLUSHING or (answer is not None and is_final(answer)):
        return None
    start = group_start(drain, drains)
    return SaveRequest(request_id=request_id(facts.name, start), deadline=drain.deadline)


def _by_spec(facts: RunFacts, now: datetime) -> SaveRequest | None:
    if not facts.save_value or facts.save_asked_at is None:
        return None
    deadline = facts.save_asked_at + facts.limits.max_hold
    if now >= deadline:
        return None
    return SaveRequest(request_id=request_id(facts.name, facts.save_value), deadline=deadline)


def _by_cordon(facts: RunFacts, now: datetime) -> SaveRequest | None:
    """One early save for the newest cordon: it covers the older ones too."""
    if facts.mode is DrainMode.OFF or facts.is_fresh(now):
        return None
    drained = [node for node in facts.nodes.values() if facts.stays_on(node.name)]
    since = max((node.draining_since for node in drained if node.draining_since), default=None)
    if since is None or now >= since + facts.limits.max_hold:
        return None
    if facts.durable is not None and facts.durable.at >= since:
        return None
    deadline = since + facts.limits.max_hold
    return SaveRequest(request_id=request_id(facts.name, since), deadline=deadline)
