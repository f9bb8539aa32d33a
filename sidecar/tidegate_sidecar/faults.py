"""Why the remote tier does not take data: from an error to a reason, a sentence and a wait. Pure.

The reasons are those of the condition `RemoteTierHealthy`. Nothing below `loop` retries.
"""

import errno
from dataclasses import dataclass
from enum import StrEnum

from tidegate_contract.errors import Corrupt, Reject, Retry
from tidegate_contract.seal import FileEntry


class Reason(StrEnum):
    """State of the remote tier as this node sees it."""

    OK = "OK"
    NO_SPACE = "NoSpace"
    QUOTA = "Quota"
    STALLED = "Stalled"
    DENIED = "Denied"
    READ_ONLY = "ReadOnly"
    UNREADABLE = "Unreadable"


class Side(StrEnum):
    """Whose failure it is."""

    REMOTE = "Remote"
    SOURCE = "Source"
    ATTEMPT = "Attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failed task.

    Attributes:
        side: `REMOTE` makes every task wait; `SOURCE` and `ATTEMPT` concern one attempt alone.
        reason: of the condition; `OK` unless the side is `REMOTE`.
        message: a sentence for people.
        damaged_file: name of a local file whose bytes do not match its seal; None otherwise.
    """

    side: Side
    reason: Reason
    message: str
    damaged_file: str | None = None


class SourceError(Exception):
    """A local file of an attempt could not be read, or is not what its seal says.

    Attributes:
        damaged: what the file should be, if its bytes were read and are wrong.
    """

    def __init__(self, message: str, damaged: FileEntry | None = None) -> None:
        """Keeps the sentence and what the file should be."""
        super().__init__(message)
        self.damaged = damaged


class RemoteDamaged(Exception):
    """A document that all of the run's work on the remote tier rests on is damaged."""


_REASONS = {
    errno.ENOSPC: Reason.NO_SPACE,
    errno.EDQUOT: Reason.QUOTA,
    errno.EFBIG: Reason.QUOTA,
    errno.EACCES: Reason.DENIED,
    errno.EPERM: Reason.DENIED,
    errno.EROFS: Reason.READ_ONLY,
}
_ADVICE = {
    Reason.NO_SPACE: "the remote tier is full; free space there or lower remote.keep",
    Reason.QUOTA: "the quota of the remote tier is used up; raise it or lower remote.keep",
    Reason.DENIED: "the remote tier refuses this user; check owner and group of the run's folder",
    Reason.READ_ONLY: "the remote tier is mounted read-only; mount it for writing",
    Reason.STALLED: "the remote tier does not answer as it should; copies go on when it does",
    Reason.UNREADABLE: "what lies on the tiers cannot be read; look at the file that is named",
}
_FIRST_SECONDS = {Reason.STALLED: 1.0, Reason.UNREADABLE: 1.0}
_BASE_SECONDS = {Reason.DENIED: 30.0, Reason.READ_ONLY: 30.0}
_MAX_SECONDS = {Reason.NO_SPACE: 60.0, Reason.QUOTA: 60.0}


def fault_of(error: Exception) -> Fault:
    """The fault of an error that a task ended with."""
    match error:
        case SourceError():
            return Fault(
                side=Side.SOURCE,
                reason=Reason.OK,
                message=str(error),
                damaged_file=error.damaged.name if error.damaged else None,
            )
        case RemoteDamaged():
            return unreadable(str(error))
        case MemoryError():
            return unreadable("it takes more memory than this process may have")
        case Corrupt():
            return Fault(side=Side.ATTEMPT, reason=Reason.OK, message=str(error))
        case Reject():
            return Fault(side=Side.REMOTE, reason=Reason.DENIED, message=str(error))
        case Retry():
            return Fault(side=Side.REMOTE, reason=Reason.STALLED, message=str(error))
        case OSError():
            reason = _REASONS.get(error.errno or 0, Reason.STALLED)
            where = f" ({error.filename})" if error.filename else ""
            return Fault(
                side=Side.REMOTE,
                reason=reason,
                message=f"{_ADVICE[reason]}: {error.strerror or error}{where}",
            )
        case _:
            return Fault(
                side=Side.ATTEMPT, reason=Reason.OK, message=f"{type(error).__name__}: {error}"
            )


def unreadable(message: str) -> Fault:
    """The fault of a task that concerns no single attempt and met something damaged."""
    return Fault(
        side=Side.REMOTE,
        reason=Reason.UNREADABLE,
        message=f"{_ADVICE[Reason.UNREADABLE]}: {message}",
    )


def stalled(seconds: float) -> Fault:
    """The fault of a child that showed no progress."""
    return Fault(
        side=Side.REMOTE,
        reason=Reason.STALLED,
        message=f"{_ADVICE[Reason.STALLED]}: no progress for {seconds:.0f} s",
    )


def backoff_seconds(reason: Reason, failures: int, jitter: float) -> float:
    """How long the next task waits.

    Args:
        reason: of the newest failure.
        failures: in a row, 1 or more.
        jitter: in [0, 1); spreads the waits of many nodes over 80 to 120 %.
    """
    first = _FIRST_SECONDS.get(reason)
    if first is not None and failures == 1:
        return first * (0.8 + 0.4 * jitter)
    doublings = min(failures - (1 if first is None else 2), 16)
    seconds = _BASE_SECONDS.get(reason, 10.0) * float(2**doublings)
    return min(seconds, _MAX_SECONDS.get(reason, 300.0)) * (0.8 + 0.4 * jitter)
