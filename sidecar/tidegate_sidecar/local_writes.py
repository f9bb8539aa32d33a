"""Writes to the local tier that may fail without stopping the flush. One thread.

A full or read-only local tier is when its sealed steps are needed elsewhere the most: whatever
cannot be written here is told once and tried again later, and everything else goes on.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tidegate_contract.errors import Corrupt

logger = logging.getLogger(__name__)

_FIRST_SECONDS = 1.0
_MAX_SECONDS = 10.0
"""A save request waits at most this long once the tier takes writes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    message: str
    failures: int
    retry_at: float


class LocalWrites:
    """Which kinds of writes fail now, and when each is tried again."""

    def __init__(self) -> None:
        """All is well."""
        self._failing: dict[str, _Failure] = {}

    @property
    def message(self) -> str:
        """A sentence on what fails now; empty when all is well."""
        return "; ".join(f"{what}: {found.message}" for what, found in self._failing.items())

    def attempt(self, what: str, write: Callable[[], object], now: float) -> None:
        """Writes, unless this kind failed a moment ago.

        Args:
            what: the kind of write, for people.
            write: does it; what it raises of the local tier is told, not raised.
            now: on the steady clock.
        """
        last = self._failing.get(what)
        if last is not None and now < last.retry_at:
            return
        try:
            write()
        except OSError as error:
            # Without the name of the file: that of an unfinished one is new each time.
            self._fail(what, error.strerror or str(error), now)
            return
        except Corrupt as error:
            self._fail(what, str(error), now)
            return
        if self._failing.pop(what, None) is not None:
            logger.info("the local tier takes writes again", extra={"what": what})

    def _fail(self, what: str, message: str, now: float) -> None:
        last = self._failing.get(what)
        failures = last.failures + 1 if last else 1
        wait = min(_FIRST_SECONDS * float(2 ** min(failures - 1, 16)), _MAX_SECONDS)
        self._failing[what] = _Failure(message=message, failures=failures, retry_at=now + wait)
        if last is None or last.message != message:
            logger.error("the local tier takes no write", extra={"what": what, "error": message})
