"""What only rank 0 knows and tells through the agreement: requests, live policy, clocks, nonces.

Main thread, except `dismiss_early`, which the state thread calls.
"""

import logging
import secrets
import time
from dataclasses import replace
from datetime import UTC, datetime

from tidegate.agreement import Message
from tidegate.observe import is_durable
from tidegate.report import ControlReader, Reporter
from tidegate.site import Site
from tidegate_contract.cadence import Cadence, CadenceKind, interval_seconds
from tidegate_contract.document import encode
from tidegate_contract.errors import TidegateError
from tidegate_contract.wire import AnswerResult, Policy, SaveAnswer, SaveRequest, StepNote

_LOG = logging.getLogger(__name__)
_FRESH_SECONDS = 5.0
"""How long a stop waits for the remote tier's word; without it the step is saved again."""


class Lead:
    """Rank 0's share of a message.

    Attributes:
        announced: the policy document whose size was told last.
    """

    def __init__(self, site: Site, reporter: Reporter) -> None:
        """Opens the control document's folder."""
        self._site = site
        self._reporter = reporter
        self._control = ControlReader(site.local)
        self._early = ControlReader(site.local)
        self._has_stepped = False
        self._dismissed = 0
        self._saved_at = time.monotonic()
        self._stall_seconds = self._seal_seconds = 0.0
        self.announced = b""
        reporter.on_beat = self.dismiss_early

    def add_word(self, message: Message, policy: Policy, asked_fresh: StepNote | None) -> Message:
        """The message with rank 0's fields.

        Args:
            message: what every rank says.
            policy: what all ranks work by.
            asked_fresh: at a stop, the newest sealed step: is it durable and young?
        """
        self._has_stepped = True
        control = self._control.read()
        self.announced = b""
        if control.policy is not None and control.policy != policy:
            self.announced = encode(control.policy)
        return replace(
            message,
            request=self._open_request(control.request),
            nonce=secrets.randbits(63),
            interval=int(self._is_interval_over(policy.cadence)),
            backlogged=int(control.is_backlogged),
            fresh=int(asked_fresh is not None and self._is_fresh(asked_fresh, policy)),
            policy_bytes=len(self.announced),
        )

    def note_save(self) -> None:
        """A save begins: the wall-time rules count from here."""
        self._saved_at = time.monotonic()

    def note_durations(self, stall_seconds: float, seal_seconds: float) -> None:
        """What the newest save cost, for the automatic interval."""
        self._stall_seconds, self._seal_seconds = stall_seconds, seal_seconds

    def dismiss_early(self) -> None:
        """Answers a request that comes before the first step: the restored step holds it all."""
        if not self._has_stepped:
            self._dismiss(self._early.read().request)

    def start(self) -> None:
        """Before the first step: a request of before this start was obeyed then."""
        self._dismiss(self._control.read().request)

    def close(self) -> None:
        """Ends the reading; after the state thread has ended."""
        self._control.close()
        self._early.close()

    def _dismiss(self, request: SaveRequest | None) -> None:
        if request is None or request.request_id == self._dismissed:
            return
        self._dismissed = request.request_id
        sealed = self._reporter.state.sealed
        self._reporter.update(
            answer=SaveAnswer(
                request_id=request.request_id,
                result=AnswerResult.NOTHING_NEW,
                attempt=sealed.attempt if sealed is not None else None,
            )
        )

    def _open_request(self, request: SaveRequest | None) -> int:
        if request is None or request.request_id == self._dismissed:
            return 0
        return request.request_id if request.deadline > datetime.now(UTC) else 0

    def _is_interval_over(self, cadence: Cadence) -> bool:
        seconds = cadence.min_interval_seconds
        if cadence.by in (CadenceKind.INTERVAL, CadenceKind.AUTO):
            seconds = interval_seconds(
                cadence, stall_seconds=self._stall_seconds, durable_seconds=self._seal_seconds
            )
        return time.monotonic() - self._saved_at >= seconds

    def _is_fresh(self, sealed: StepNote, policy: Policy) -> bool:
        age = (datetime.now(UTC) - sealed.at).total_seconds()
        has_tier = self._site.settings.remote is not None
        if age > policy.freshness_seconds or sealed.attempt is None or not has_tier:
            return False
        try:
            return is_durable(self._site, sealed.attempt, within_seconds=_FRESH_SECONDS)
        except (OSError, TidegateError) as error:
            _LOG.warning("durable step not known", extra={"error": str(error)})
            return False
