"""When to save: by tokens, steps, wall time, or an interval derived from the accepted loss. Pure.

Called by the trainer on every rank with globally agreed counts, so all ranks decide alike; what
only one clock knows (`interval_elapsed`) comes from rank 0 through the agreement.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_TOKENS = 50_000_000


class CadenceKind(StrEnum):
    """What a save is counted by."""

    TOKENS = "Tokens"
    STEPS = "Steps"
    INTERVAL = "Interval"
    AUTO = "Auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """When to save.

    Attributes:
        by: which of the following counts.
        tokens: global tokens between two saves.
        steps: optimizer steps between two saves.
        interval_seconds: wall time between two saves.
        max_loss_seconds: accepted loss of `AUTO`, wall time.
        mtbf_seconds: mean time between failures for `AUTO`; None when not known.
        min_interval_seconds: floor of wall time between two saves, for every kind.
    """

    by: CadenceKind = CadenceKind.TOKENS
    tokens: int = DEFAULT_TOKENS
    steps: int | None = None
    interval_seconds: float | None = None
    max_loss_seconds: float | None = None
    mtbf_seconds: float | None = None
    min_interval_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuses a cadence that would never, or always, save."""
        if self.tokens < 1:
            raise ValueError("tokens must be at least 1")
        wanted = {
            CadenceKind.STEPS: self.steps,
            CadenceKind.INTERVAL: self.interval_seconds,
            CadenceKind.AUTO: self.max_loss_seconds,
        }
        if self.by in wanted and not (wanted[self.by] or 0) > 0:
            raise ValueError(f"cadence by {self.by} needs its value, above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Agreed counts since the run began.

    Attributes:
        step: optimizer steps.
        tokens: tokens over all ranks.
    """

    step: int
    tokens: int


def crosses(before: int, now: int, interval: int) -> bool:
    """True when a multiple of `interval` lies in (before, now]; never twice for one multiple."""
    return before // interval != now // interval


def is_due(cadence: Cadence, before: Progress, now: Progress, *, interval_elapsed: bool) -> bool:
    """Whether the step that led from `before` to `now` ends with a save.

    Args:
        cadence: the policy's rule.
        before: counts at the previous step.
        now: counts at this step.
        interval_elapsed: rank 0's word that the wall-time interval (INTERVAL, AUTO) is over.
    """
    if cadence.by is CadenceKind.TOKENS:
        return crosses(before.tokens, now.tokens, cadence.tokens)
    if cadence.by is CadenceKind.STEPS:
        return crosses(before.step, now.step, cadence.steps or 1)
    return interval_elapsed


def interval_seconds(cadence: Cadence, *, stall_seconds: float, durable_seconds: float) -> float:
    """Wall time between two saves for INTERVAL and AUTO.

    For AUTO it is the largest interval that keeps the accepted loss: a failure just before a save
    becomes durable loses the interval and the time of the save and its copy. A known mean time
    between failures M can only shorten it, to Daly's optimum for the measured stall d
    (J. T. Daly, 2006: sqrt(2dM)·(1 + sqrt(d/2M)/3 + d/18M) - d, and M when d ≥ 2M).

    Args:
        cadence: of kind INTERVAL or AUTO.
        stall_seconds: measured pause of training per save.
        durable_seconds: measured time from the start of a save until it is durable.
    """
    if cadence.by is CadenceKind.INTERVAL:
        return max(cadence.interval_seconds or 0.0, cadence.min_interval_seconds)
    seconds = (cadence.max_loss_seconds or 0.0) - durable_seconds
    if cadence.mtbf_seconds:
        seconds = min(seconds, _daly(stall_seconds, cadence.mtbf_seconds))
    return max(seconds, cadence.min_interval_seconds, 1.0)


def _daly(stall: float, mtbf: float) -> float:
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall
