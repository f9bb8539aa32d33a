"""What became of save requests: the same on all ranks, as it follows from the agreement only."""

from tidegate.report import Reporter
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import AnswerResult, SaveAnswer

_MAX_TRIES = 2
"""After so many failed saves a request is answered and left."""


class Answers:
    """The newest request and its answer; main thread only.

    Attributes:
        taken: id of the newest request that a save was begun for; 0 means none.
    """

    def __init__(self, reporter: Reporter) -> None:
        """No request is known yet."""
        self._reporter = reporter
        self._known = 0
        self._failed = 0
        self._failures = 0
        self.taken = 0

    @property
    def open_request(self) -> int:
        """Id of a request that no save was begun for; 0 means none."""
        return 0 if self._known == self.taken else self._known

    def hear(self, request_id: int) -> None:
        """Takes the id that a message carried; 0 says nothing."""
        if request_id:
            self._known = request_id

    def acknowledge(self, attempt: Attempt) -> int:
        """A save begins; it answers the open request.

        Returns:
            The request's id, or 0 if none was open.
        """
        request_id = self.open_request
        if request_id:
            self.taken = request_id
            self._tell(request_id, AnswerResult.ACKNOWLEDGED, attempt)
        return request_id

    def settle(self, request_id: int, attempt: Attempt, *, is_sealed: bool) -> None:
        """The save that was begun for a request has ended; a failed one is tried once more."""
        if request_id == 0 or request_id != self.taken:
            return
        if is_sealed:
            self._tell(request_id, AnswerResult.SEALED, attempt)
        elif self._fail(request_id, attempt):
            self.taken = 0

    def fail_open(self) -> None:
        """No save could be begun for the open request; it is tried once more, like a failed one."""
        request_id = self.open_request
        if request_id and not self._fail(request_id, None):
            self.taken = request_id

    def tell_nothing_new(self, attempt: Attempt | None) -> None:
        """An open request finds everything saved already."""
        if self.open_request:
            self.taken = self.open_request
            self._tell(self.taken, AnswerResult.NOTHING_NEW, attempt)

    def _fail(self, request_id: int, attempt: Attempt | None) -> bool:
        """Counts and tells a failure; True if the request is tried again."""
        if request_id != self._failed:
            self._failed, self._failures = request_id, 0
        self._failures += 1
        self._tell(request_id, AnswerResult.FAILED, attempt)
        return self._failures < _MAX_TRIES

    def _tell(self, request_id: int, result: AnswerResult, attempt: Attempt | None) -> None:
        failures = self._failures if request_id == self._failed else 0
        answer = SaveAnswer(
            request_id=request_id, result=result, attempt=attempt, failures=failures
        )
        self._reporter.update(answer=answer)
