"""What each sealed save is told in the log, and whether saves keep up with their cadence.

On rank 0 only, main thread. Copies to the remote tier are not known here: times end at the seal.
"""

import logging
from collections.abc import Mapping
from typing import Any

from tidegate.saves import Save
from tidegate_contract.cadence import Cadence, CadenceKind
from tidegate_contract.seal import SaveReason

_LOG = logging.getLogger(__name__)
_WARN_EVERY = 10
_SETTINGS = {
    CadenceKind.TOKENS: "cadence.tokens",
    CadenceKind.STEPS: "cadence.steps",
    CadenceKind.INTERVAL: "cadence.interval_seconds",
    CadenceKind.AUTO: "cadence.max_loss_seconds",
}


class Pace:
    """Follows the sealed saves of one trainer, in their order."""

    def __init__(self) -> None:
        """Nothing was saved yet."""
        self._begun: float | None = None
        self._late_in_row = 0

    def tell(self, save: Save, cadence: Cadence, fields: Mapping[str, Any]) -> None:
        """Logs one line, and a warning where saves take longer than the time between two.

        The warning comes when it begins to be so, and with every tenth such save in a row.

        Args:
            save: sealed by all ranks.
            cadence: that the trainer works by.
            fields: of the log record.
        """
        _LOG.info("%s", describe_save(save), extra=dict(fields))
        interval = self._interval_before(save)
        if interval is None:
            return
        self._late_in_row = self._late_in_row + 1 if save.seal_ms / 1000 > interval else 0
        if self._late_in_row % _WARN_EVERY == 1:
            _LOG.warning("%s", describe_lateness(save, interval, cadence), extra=dict(fields))

    def _interval_before(self, save: Save) -> float | None:
        """Seconds between two saves of the cadence; what else asks for one comes at any time."""
        if save.ticket.reason is not SaveReason.CADENCE:
            return None
        begun, self._begun = self._begun, save.started
        return None if begun is None else save.started - begun


def describe_save(save: Save) -> str:
    """The line of a sealed save; its size is of rank 0's files alone."""
    return (
        f"saved step {save.ticket.attempt.step} ({save.ticket.tokens} tokens): "
        f"pause {save.pause_ms:.0f} ms, sealed on the nodes after {save.seal_ms:.0f} ms, "
        f"{_amount(save.size_bytes)} on rank 0"
    )


def describe_lateness(save: Save, interval_seconds: float, cadence: Cadence) -> str:
    """What to change where saves take longer than the time between two."""
    return (
        f"saves take {save.seal_ms / 1000:.1f} s until they are sealed, without their copy to the "
        f"remote tier, and one is made every {interval_seconds:.1f} s: raise "
        f"{_SETTINGS[cadence.by]} or cadence.min_interval_seconds, or give the local tier a "
        "faster disk"
    )


def _amount(size_bytes: int) -> str:
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
