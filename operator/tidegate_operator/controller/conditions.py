"""Conditions: how verdicts become a list whose times move only when a status does. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tidegate_operator.api_types import Condition, ConditionStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One condition as it is now.

    Attributes:
        type: of the condition.
        is_true: None when nobody can know.
        reason: one CamelCase word.
        message: one sentence; without numbers that move at every save, as each change is a write.
    """

    type: StrEnum
    is_true: bool | None
    reason: StrEnum
    message: str


def build_conditions(
    previous: Iterable[Condition], verdicts: Iterable[Verdict], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The conditions to apply: exactly one for each verdict, in its order.

    Args:
        previous: as stored; their times are kept where the status is the same.
        verdicts: as they are now.
        generation: of the spec they were derived from.
        now: aware UTC.
    """
    stored = {condition.type: condition for condition in previous}
    return tuple(_build(stored.get(one.type), one, generation, now) for one in verdicts)


def _build(
    previous: Condition | None, verdict: Verdict, generation: int, now: datetime
) -> Condition:
    status = _STATUS[verdict.is_true]
    is_same = previous is not None and previous.status is status
    return Condition(
        type=verdict.type,
        status=status,
        reason=verdict.reason,
        message=verdict.message,
        last_transition_time=(
            previous.last_transition_time if previous and is_same else now.replace(microsecond=0)
        ),
        observed_generation=generation,
    )


_STATUS: dict[bool | None, ConditionStatus] = {
    True: ConditionStatus.TRUE,
    False: ConditionStatus.FALSE,
    None: ConditionStatus.UNKNOWN,
}
