"""Delays between tries: doubling, capped, spread so that clients do not move together. Pure."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Bounds of a doubling delay.

    Attributes:
        first_seconds: before the second try.
        longest_seconds: cap.
    """

    first_seconds: float
    longest_seconds: float

    def delay(self, failures: int, draw: float | None = None) -> float:
        """Seconds to wait after so many failures in a row.

        Args:
            failures: 1 after the first failure.
            draw: from [0, 1); None draws one. The delay is between half of the bound and all of it.
        """
        # 2^40 is beyond any cap and still a float without overflow.
        bound = min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 40))
        return bound * (0.5 + 0.5 * (random.random() if draw is None else draw))
