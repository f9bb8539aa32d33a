"""How saves ended: figures for the report, failures in a row for the policy; main thread only."""

from typing import Any

from tidegate.report import Reporter
from tidegate_contract.errors import Retry
from tidegate_contract.wire import OnFailure, Policy, SaveFigures


class SavesFailed(Retry):
    """Too many saves in a row have failed, and the policy says that training must end then."""


class Outcomes:
    """The same on all ranks, as it follows from the agreement only.

    Attributes:
        failures_in_row: saves that failed since the last one that was sealed.
    """

    def __init__(self, reporter: Reporter) -> None:
        """Nothing was saved yet."""
        self._reporter = reporter
        self.failures_in_row = 0

    def count_sealed(self, pause_ms: float, seal_ms: float, **changes: Any) -> None:
        """One save was sealed.

        Args:
            pause_ms: training stood still for its snapshot.
            seal_ms: from its begin until its seal.
            changes: other fields of the state that change with it.
        """
        self.failures_in_row = 0
        self._count(failed=0, pause_ms=round(pause_ms), seal_ms=round(seal_ms), **changes)

    def count_failed(self, pause_ms: float | None = None) -> None:
        """One save failed; `pause_ms` is None if it could not even begin."""
        self.failures_in_row += 1
        figures = self._reporter.state.saves
        pause = figures.pause_ms if pause_ms is None else round(pause_ms)
        self._count(failed=1, pause_ms=pause, seal_ms=figures.seal_ms)

    def check(self, policy: Policy) -> None:
        """Ends training where the policy says so.

        Raises:
            SavesFailed: the policy ends training after so many failures in a row.
        """
        is_fatal = policy.on_failure is OnFailure.FAIL
        if is_fatal and self.failures_in_row >= max(policy.fail_after, 1):
            raise SavesFailed(f"{self.failures_in_row} saves in a row have failed")

    def _count(self, *, failed: int, pause_ms: int, seal_ms: int, **changes: Any) -> None:
        figures = self._reporter.state.saves
        saves = SaveFigures(
            total=figures.total + 1,
            failed=figures.failed + failed,
            pause_ms=pause_ms,
            seal_ms=seal_ms,
        )
        self._reporter.update(saves=saves, **changes)
