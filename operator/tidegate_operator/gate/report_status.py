"""What a lead's report makes of the run's status: the whole set of fields of one manager. Pure.

Called by `gate.clocks`. A field that a report does not speak of keeps the value it had: an apply
that left it out would delete it.
"""

from datetime import datetime, timedelta
from typing import Any

from tidegate_contract.wire import (
    AnswerResult,
    DurableNote,
    Report,
    RestoreNote,
    SaveAnswer,
    StepNote,
)
from tidegate_operator.api_run_status import (
    Backlog,
    DurableStatus,
    LastRestore,
    RestoreTier,
    RunStatus,
    SaveCounts,
    StepStatus,
)
from tidegate_operator.api_run_status import SaveAnswer as AnsweredRequest
from tidegate_operator.gate.asks import is_final, request_id

FIELDS = (
    "runID",
    "progress",
    "lastSealed",
    "lastDurable",
    "lastRestore",
    "backlog",
    "saves",
    "saveRequest",
    "lastReportTime",
)
"""All that the manager of reports owns in status."""
QUIET = frozenset({"progress", "backlog", "saves", "lastReportTime"})
"""What changes all the time and waits for the heartbeat."""
HEARTBEAT = timedelta(seconds=30)

_UNITS = (("Pi", 2**50), ("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))

Fields = dict[str, Any]


def build_report_status(
    report: Report, before: RunStatus, save_value: str, now: datetime
) -> Fields:
    """The fields of the manager `tidegate-gate`, each as it goes over the wire.

    Args:
        report: the newest, of this run.
        before: status as it was read.
        save_value: `spec.saveRequest`; empty when there is none.
        now: UTC.
    """
    state = report.state
    durable = _durable(report.durable, before.last_durable, now)
    sealed = _step(state.sealed) if state and state.sealed else before.last_sealed
    restore = _restore(state.restore) if state and state.restore else before.last_restore
    wanted = RunStatus(
        run_id=report.run_id,
        progress=_step(state.progress) if state else before.progress,
        last_sealed=sealed,
        last_durable=durable,
        last_restore=restore,
        backlog=_backlog(report),
        saves=SaveCounts(total=state.saves.total, failed=state.saves.failed)
        if state
        else before.saves,
        save_request=_answered(report, save_value, before, durable),
        last_report_time=now,
    )
    return wanted.to_wire()


def is_write_due(
    observed: Fields, wanted: Fields, last_write: datetime | None, now: datetime
) -> bool:
    """Whether a report is worth a write now: something that matters changed, or the heartbeat.

    Args:
        observed: status as read.
        wanted: what `build_report_status` gave.
        last_write: UTC of this replica's newest write for the run; None before.
        now: UTC.
    """
    if last_write is None or now - last_write >= HEARTBEAT:
        return True
    loud = [name for name in FIELDS if name not in QUIET]
    return any(_plain(observed.get(name)) != _plain(wanted.get(name)) for name in loud)


def format_backlog(size_bytes: int) -> str:
    """Bytes for people, as in `41Gi` or `1.5Gi`; rounded, unlike `quantity.format_size`."""
    for unit, unit_bytes in _UNITS:
        if size_bytes >= unit_bytes:
            count = size_bytes / unit_bytes
            return (
                f"{count:.0f}{unit}" if count >= 9.95 else f"{count:.1f}".removesuffix(".0") + unit
            )
    return str(size_bytes)


def _plain(value: Any) -> Any:
    """A value without what is observed anew each time; the API server may write times otherwise."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items() if not name.endswith("Time")}
    return value


def _step(note: StepNote) -> StepStatus:
    return StepStatus(step=note.step, tokens=note.tokens, time=note.at)


def _durable(
    note: DurableNote | None, before: DurableStatus | None, now: datetime
) -> DurableStatus | None:
    if note is None:
        return before
    is_known = before is not None and (before.step, before.attempt) == (
        note.step,
        note.attempt.nonce,
    )
    last = before.time if before is not None else None
    # Never in the future, and above all never back: the API server refuses that write.
    time = min(note.committed_at, now)
    if last is not None:
        time = last if is_known else max(last, time)
    return DurableStatus(
        step=note.step,
        tokens=note.tokens,
        attempt=note.attempt.nonce,
        time=time,
        observed_time=before.observed_time if before is not None and is_known else now,
        path=note.path,
        size_bytes=note.size_bytes,
        digest=note.manifest_sha256,
    )


def _restore(note: RestoreNote) -> LastRestore:
    return LastRestore(
        step=note.attempt.step if note.attempt else None,
        tier=RestoreTier(note.tier) if note.tier in set(RestoreTier) else None,
        reason=note.reason[:256],
        time=note.at,
        seconds=round(note.seconds),
        bytes_local=note.bytes_local,
        bytes_remote=note.bytes_remote,
    )


def _backlog(report: Report) -> Backlog:
    waiting = report.backlog
    return Backlog(
        steps=waiting.steps,
        bytes=waiting.size_bytes,
        size=format_backlog(waiting.size_bytes),
        oldest_time=waiting.oldest_at,
    )


def _answered(
    report: Report, value: str, before: RunStatus, durable: DurableStatus | None
) -> AnsweredRequest | None:
    known = before.save_request
    if not value:
        return known
    run, answer = f"{report.namespace}/{report.run}", report.state.answer if report.state else None
    if known is None or known.value != value:
        known = AnsweredRequest(value=value, result="Requested")
    if answer is not None and answer.request_id == request_id(run, value):
        step = answer.attempt.step if answer.attempt else known.step
        known = AnsweredRequest(value=value, step=step, result=_result(answer))
    is_saved = known.result in ("Sealed", "NothingNew") and known.step is not None
    if is_saved and durable is not None and (durable.step or 0) >= (known.step or 0):
        return AnsweredRequest(value=value, step=known.step, result="Durable")
    return known


def _result(answer: SaveAnswer) -> str:
    if answer.result is AnswerResult.ACKNOWLEDGED or not is_final(answer):
        return "Saving"
    return answer.result.value
