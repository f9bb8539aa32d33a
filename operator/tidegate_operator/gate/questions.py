"""What a drain asks of its run's facts: idle, copied, silent? Pure.

Answers that people read are sentences; empty means no. Called by `gate.hold`.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from tidegate_contract.wire import Phase, SaveAnswer
from tidegate_operator.gate.asks import accepted_ids, current_ask, spec_turn_end
from tidegate_operator.gate.facts import Drain, Durable, LeadReport, RunFacts

LEAD_IS_HERE = timedelta(seconds=30)
"""A lead whose newest report is older polls another replica now; polls last 20 s."""
PATIENCE_ELSEWHERE = timedelta(seconds=60)
"""`status.lastReportTime` of a run that reports to the other replica is never older than this."""

_IDLE_PHASES = frozenset({None, Phase.STARTING, Phase.RESTORING, Phase.FINISHED})


def find_durable(facts: RunFacts, answer: SaveAnswer | None) -> str:
    """A sentence once the asked save is committed; empty before.

    A commit proves the seals that nobody told of yet.

    Args:
        facts: of the run.
        answer: to the save that a drain waits for; None before one.
    """
    durable = facts.durable
    if answer is None or answer.attempt is None or durable is None:
        return ""
    return f"step {durable.step} is durable" if durable.is_attempt(answer.attempt) else ""


def find_idle(facts: RunFacts, since: datetime) -> str:
    """Why the run has nothing to lose, as a sentence; empty when it has, or when nobody knows.

    Args:
        facts: of the run.
        since: UTC of the eviction.
    """
    report, durable = facts.report, facts.durable
    if report is None:
        return "" if facts.last_report_at else "no trainer of this run has reported yet"
    # An older report tells of a moment before the eviction; the request itself brings a new one.
    if report.received_at <= since:
        return ""
    if report.phase in _IDLE_PHASES:
        if _is_copy_due(report, durable):
            return ""
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


def find_waiting(facts: RunFacts, since: datetime) -> str:
    """What an idle trainer left to be copied, as a sentence; empty when nothing is known of it.

    Args:
        facts: of the run.
        since: UTC of the eviction.
    """
    report = facts.report
    if report is None or report.received_at <= since or report.phase not in _IDLE_PHASES:
        return ""
    if not _is_copy_due(report, facts.durable):
        return ""
    named = f"step {report.sealed.step}" if report.sealed else "a step of a trainer before"
    return f"{named} is sealed and is copied to the remote tier"


def is_active_again(facts: RunFacts, since: datetime, now: datetime) -> bool:
    """Whether the trainer makes steps that a drain, begun while it was idle, must not lose.

    Args:
        facts: of the run.
        since: UTC of the eviction.
        now: UTC.
    """
    report = facts.report
    if report is None or report.received_at <= since or now - report.received_at >= LEAD_IS_HERE:
        return False
    return report.phase not in _IDLE_PHASES


def _is_copy_due(report: LeadReport, durable: Durable | None) -> bool:
    """Whether something is sealed and not durable: on the lead's node, or by all ranks."""
    if report.backlog_steps or report.sealed is None:
        return report.backlog_steps > 0
    if durable is None:
        return True
    # A commit after the seal at no lower step holds all that was sealed.
    is_later = report.sealed_at is not None and durable.at >= report.sealed_at
    is_covered = is_later and durable.step >= report.sealed.step
    return not is_covered and not durable.is_attempt(report.sealed)


def is_silent(facts: RunFacts, drain: Drain, drains: Sequence[Drain], now: datetime) -> bool:
    """Whether the trainer has let the time pass in which it should have begun the save.

    Args:
        facts: of the run.
        drain: in Requested.
        drains: all entries of the run.
        now: UTC.
    """
    timeout = facts.limits.contact_timeout
    turns = [one.released_at for one in drains if one.released_at and one.node != drain.node]
    if (end := spec_turn_end(facts)) is not None:
        turns.append(min(end, now))
    if now - max([drain.requested_at, *turns]) < timeout:
        return False
    report = facts.report
    if report is not None and now - report.received_at < LEAD_IS_HERE:
        ask = current_ask(facts, drains, now)
        return ask is not None and ask.request_id in accepted_ids(facts, drain, drains)
    # The lead may poll the other replica, which then sees its answers and writes now and then.
    patience = max(timeout, PATIENCE_ELSEWHERE)
    return facts.last_report_at is None or now - facts.last_report_at >= patience
