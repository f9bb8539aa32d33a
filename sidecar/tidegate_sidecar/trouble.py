"""What fails at the moment, and when it is tried again. Pure; `loop` passes `now`.

Each kind of task has its own clock: a full file system stops copies and not looks. An attempt with
a failure of its own is set aside alone.
"""

from collections.abc import Container
from dataclasses import dataclass

from tidegate_contract.layout import Attempt
from tidegate_sidecar.faults import Fault, Reason, backoff_seconds

REFUSED_SECONDS = 60.0
_LASTING_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A kind of task that fails on the remote tier.

    Attributes:
        reason, message: of the newest failure.
        failures: in a row.
        retry_at: on the steady clock.
    """

    reason: Reason
    message: str
    failures: int
    retry_at: float


class Troubles:
    """Failing kinds of tasks and refused attempts."""

    def __init__(self) -> None:
        """All is well."""
        self._by_kind: dict[type, Trouble] = {}
        self._refused: dict[Attempt, float] = {}

    def fail(self, kind: type, fault: Fault, now: float, jitter: float) -> Trouble:
        """Notes a failure on the remote tier; its kind waits, longer each time in a row."""
        old = self._by_kind.get(kind)
        failures = old.failures + 1 if old and old.reason is fault.reason else 1
        wait = backoff_seconds(fault.reason, failures, jitter)
        self._by_kind[kind] = Trouble(
            reason=fault.reason, message=fault.message, failures=failures, retry_at=now + wait
        )
        return self._by_kind[kind]

    def succeed(self, kind: type) -> None:
        """This kind of task works."""
        self._by_kind.pop(kind, None)

    def keep(self, wanted: Container[type]) -> None:
        """Forgets failures of what nobody wants any more."""
        self._by_kind = {kind: t for kind, t in self._by_kind.items() if kind in wanted}

    def may_start(self, kind: type, now: float) -> bool:
        """No failure, or its wait is over."""
        trouble = self._by_kind.get(kind)
        return trouble is None or now >= trouble.retry_at

    @property
    def worst(self) -> Trouble | None:
        """The one that has failed most often; None when all is well."""
        return max(self._by_kind.values(), key=lambda trouble: trouble.failures, default=None)

    @property
    def is_lasting(self) -> bool:
        """Something damaged was met again and again: only a person can mend that."""
        return any(
            trouble.reason is Reason.UNREADABLE and trouble.failures >= _LASTING_FAILURES
            for trouble in self._by_kind.values()
        )

    def refuse(self, attempt: Attempt, now: float) -> None:
        """Sets an attempt aside for a while."""
        self._refused[attempt] = now + REFUSED_SECONDS

    def refused(self, now: float) -> frozenset[Attempt]:
        """Attempts that are set aside now."""
        self._refused = {attempt: until for attempt, until in self._refused.items() if now < until}
        return frozenset(self._refused)
