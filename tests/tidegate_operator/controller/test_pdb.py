from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from tidegate_operator.controller.pdb import (
    LOWER_AFTER,
    RECREATE_AFTER,
    Budget,
    BudgetAction,
    BudgetDecision,
    BudgetFacts,
    BudgetReason,
    build_selector,
    decide_budget,
)
from tidegate_operator.kube.kinds import Key

RUN = Key("team-a", "llama")
Ago = Callable[[float], datetime]

KEEP, CREATE, UPDATE, DELETE = BudgetAction
R = BudgetReason


def a_budget(minimum: int | str | None = 2, **over: Any) -> Budget:
    fields: dict[str, Any] = {
        "key": Key("team-a", "tidegate-llama"),
        "uid": "u",
        "run": "llama",
        "selector": build_selector("llama"),
        "min_available": minimum,
        "eviction_policy": "AlwaysAllow",
    }
    return Budget(**(fields | over))


def decide(now: datetime, **over: Any) -> BudgetDecision:
    fields: dict[str, Any] = {"run": RUN, "held": 2, "live": 2, **over}
    return decide_budget(BudgetFacts(**fields), now)


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        pytest.param({"held": 0, "live": 0}, (KEEP, R.NOTHING_TO_HOLD, 0), id="no pods"),
        pytest.param({"held": 0, "live": 3}, (KEEP, R.NOTHING_TO_HOLD, 0), id="only pending pods"),
        pytest.param({"held": 1}, (CREATE, R.POD_BOUND, 1), id="first pod bound"),
        pytest.param({"current": a_budget(2)}, (KEEP, R.HOLDING, 2), id="as it should be"),
        pytest.param({"current": a_budget(1)}, (UPDATE, R.POD_BOUND, 2), id="one more bound"),
        pytest.param(
            {"current": a_budget(1), "is_draining": True},
            (UPDATE, R.POD_BOUND, 2),
            id="raised during a drain too",
        ),
        pytest.param(
            {"held": 1, "current": a_budget(2), "is_draining": True},
            (KEEP, R.DRAINING, 2),
            id="never lowered during a drain",
        ),
        pytest.param(
            {"held": 0, "live": 1, "current": a_budget(2), "is_draining": True},
            (KEEP, R.DRAINING, 2),
            id="kept while the last pods leave",
        ),
        pytest.param(
            {"held": 0, "live": 0, "current": a_budget(2), "is_draining": True},
            (KEEP, R.SETTLING, 2),
            id="an entry that outlives all pods keeps no budget",
        ),
        pytest.param({"held": 1, "current": a_budget(2)}, (KEEP, R.SETTLING, 2), id="fewer pods"),
        pytest.param({"rivals": ("other",)}, (KEEP, R.CONFLICT, 0), id="rival before ours"),
        pytest.param(
            {"rivals": ("other",), "current": a_budget(2)},
            (DELETE, R.CONFLICT, 0),
            id="rival beside ours",
        ),
        pytest.param(
            {"current": a_budget("50%")}, (UPDATE, R.CHANGED_BY_OTHERS, 2), id="made a percentage"
        ),
        pytest.param(
            {"current": a_budget(3, selector={})}, (UPDATE, R.CHANGED_BY_OTHERS, 3), id="selector"
        ),
        pytest.param(
            {"current": a_budget(eviction_policy=None)},
            (UPDATE, R.CHANGED_BY_OTHERS, 2),
            id="eviction policy",
        ),
    ],
)
def test_budget_of_facts_is_decided(now: datetime, facts: dict[str, Any], want: Any) -> None:
    got = decide(now, **facts)
    assert (got.action, got.reason, got.min_available) == want
    assert got.message


@pytest.mark.parametrize(
    ("held", "seconds", "want"),
    [
        pytest.param(1, 59.9, (KEEP, R.SETTLING), id="too early"),
        pytest.param(1, 60, (UPDATE, R.FEWER_PODS), id="lowered"),
        pytest.param(0, 60, (DELETE, R.NOTHING_TO_HOLD), id="removed"),
    ],
)
def test_budget_above_held_pods_is_lowered_after_a_minute(
    now: datetime, ago: Ago, held: int, seconds: float, want: Any
) -> None:
    got = decide(now, held=held, current=a_budget(2), excess_since=ago(seconds))
    assert (got.action, got.reason) == want


def test_budget_drain_restarts_the_minute_and_tells_when_to_look_again(
    now: datetime, ago: Ago
) -> None:
    draining = decide(now, held=1, current=a_budget(2), is_draining=True, excess_since=ago(3600))
    assert draining.recheck_after is None
    later = decide(now, held=1, current=a_budget(2), excess_since=draining.excess_since)
    assert (later.action, later.recheck_after) == (KEEP, LOWER_AFTER)


@pytest.mark.parametrize(
    ("minutes", "want"), [(0, KEEP), (14.9, KEEP), (15, CREATE)], ids=["now", "before", "after"]
)
def test_budget_deleted_by_hand_comes_back_after_a_quarter_hour(
    now: datetime, minutes: float, want: BudgetAction
) -> None:
    deleted = now - timedelta(minutes=minutes)
    got = decide(now, deleted_at=deleted)
    assert got.action is want
    if want is KEEP:
        assert got.reason is R.DELETED_BY_HAND
        assert got.recheck_after == RECREATE_AFTER - timedelta(minutes=minutes)
