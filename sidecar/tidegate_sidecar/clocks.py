"""When the loop first saw things, on the steady clock; lost with the process, to no harm. Pure."""

from dataclasses import dataclass, field

from tidegate_contract.layout import Attempt
from tidegate_sidecar.view import RemoteView

NEVER = float("-inf")


@dataclass(slots=True)
class Clocks:
    """Of one loop; `now` is passed.

    Attributes:
        looked_at: the remote tier was last seen, with everything that was copied until now.
        retained_at: it was last tidied.
        received_at: it last gained or lost a receipt.
        finishing_at: the end began; None before.
        unseen: what was copied last, until a look that began after it.
    """

    looked_at: float = NEVER
    retained_at: float = NEVER
    received_at: float = 0.0
    finishing_at: float | None = None
    unseen: Attempt | None = None
    _copied_at: float = NEVER
    _receipts: int = -1
    _complete: dict[Attempt, float] = field(default_factory=dict)

    def end_copy(self, attempt: Attempt, now: float) -> None:
        """A copy ended, well or not: what was seen before tells less than is there."""
        self.looked_at, self._copied_at = NEVER, now
        self.unseen = attempt

    def see(self, view: RemoteView, began: float, now: float) -> None:
        """Takes note of a new picture of the remote tier; its look began at `began`."""
        if began >= self._copied_at:
            self.looked_at, self.unseen = now, None
        receipts = sum(len(step.sealed) for step in view.steps)
        if receipts != self._receipts:
            self._receipts, self.received_at = receipts, now
        self._complete = {
            step.attempt: self._complete.get(step.attempt, now)
            for step in view.steps
            if step.is_complete and not step.commit
        }

    def complete_seconds(self, now: float) -> dict[Attempt, float]:
        """How long each attempt has had all its receipts and no commit."""
        return {attempt: now - since for attempt, since in self._complete.items()}
