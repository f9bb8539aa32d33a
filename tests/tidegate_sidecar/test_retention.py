from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import TRASH, Attempt, step_folder
from tidegate_contract.wire import Phase
from tidegate_sidecar.retention import (
    TRASH_GRACE_SECONDS,
    decide_local_retention,
    decide_remote_retention,
    is_restoring,
)
from tidegate_sidecar.view import RemoteView, StepView

Build = Callable[..., Any]


def in_trash(step: StepView) -> StepView:
    return replace(step, folder=f"{TRASH}/{step_folder(step.attempt)}")


def steps_of(attempts: tuple[Attempt, ...]) -> list[int]:
    return sorted(attempt.step for attempt in attempts)


@pytest.mark.parametrize(
    ("committed", "dead", "keep", "want"),
    [
        ([10, 20, 30, 40], [], 3, [10]),
        ([10, 20, 30, 40], [], 1, [10, 20, 30]),
        ([10, 20], [], 3, []),
        ([10], [], 0, []),
        ([], [10, 20], 1, []),
        ([20], [10], 3, [10]),
        ([20], [30], 3, []),
    ],
    ids=[
        "more than kept",
        "keep one",
        "fewer than kept",
        "the last one stays whatever the policy",
        "nothing superseded without a commit",
        "uncommitted and superseded",
        "uncommitted and newer",
    ],
)
def test_remote_plan_moves_what_is_superseded(
    make: Any, committed: list[int], dead: list[int], keep: int, want: list[int]
) -> None:
    steps = [make.commit(step) for step in committed] + [
        make.view(step, sealed={0: 1}) for step in dead
    ]
    plan = decide_remote_retention(make.remote(*steps), keep)
    assert steps_of(plan.trash) == want
    assert not plan.empty


def test_remote_plan_leaves_a_folder_whose_lineage_is_unknown(make: Any) -> None:
    silent = make.view(10, lineage=None, sealed={})
    assert not decide_remote_retention(make.remote(make.commit(20), silent), 1).is_needed


def test_remote_plan_after_an_explicit_restore_keeps_the_restored_step(make: Any) -> None:
    claim = LineageClaim(
        run_id="r",
        number=2,
        restored=make.attempt(10),
        explicit=True,
        claimed_at=make.commit(10).commit.committed_at,
    )
    view = make.remote(make.commit(10), make.commit(20), claims=(claim,))
    assert steps_of(decide_remote_retention(view, 1).trash) == [20]


@pytest.mark.parametrize(
    ("age", "want"),
    [(TRASH_GRACE_SECONDS - 1, []), (TRASH_GRACE_SECONDS, [10])],
    ids=["within the grace", "after it"],
)
def test_trash_is_emptied_after_the_grace(make: Any, age: float, want: list[int]) -> None:
    view = make.remote(
        in_trash(make.commit(10)), make.commit(20), trash_age_seconds={make.attempt(10): age}
    )
    assert steps_of(decide_remote_retention(view, 1).empty) == want


@pytest.mark.parametrize(
    "outside", [[], [10]], ids=["nothing left outside", "an older one outside"]
)
def test_trash_that_holds_the_newest_commit_gives_it_back(make: Any, outside: list[int]) -> None:
    view = make.remote(
        in_trash(make.commit(20)),
        *(make.commit(step) for step in outside),
        trash_age_seconds={make.attempt(20): 10 * TRASH_GRACE_SECONDS},
    )
    plan = decide_remote_retention(view, 1)
    assert steps_of(plan.restore) == [20]
    assert not plan.empty


@pytest.mark.parametrize(
    ("sealed", "committed", "keep", "want"),
    [
        ([10, 20, 30, 40], [40], 2, [10, 20]),
        ([10, 20, 30, 40], [20], 2, [10]),
        ([10, 20, 30, 40], [], 1, []),
        ([10, 20, 30], [10], 1, []),
        ([10, 20, 30], [30], 0, [10, 20]),
        ([10], [10], 1, []),
    ],
    ids=[
        "all durable",
        "newest durable stays although older than kept",
        "nothing durable",
        "newer than every commit",
        "the newest sealed stays whatever the policy",
        "the only one",
    ],
)
def test_local_copies_go_once_a_commit_makes_them_needless(
    make: Any, sealed: list[int], committed: list[int], keep: int, want: list[int]
) -> None:
    view = make.remote(*(make.commit(step) for step in committed))
    gone = decide_local_retention([make.view(step) for step in sealed], view, keep=keep, lineage=1)
    assert steps_of(gone) == want


def test_local_copies_stay_while_the_remote_tier_was_not_seen(make: Any) -> None:
    steps = [make.view(step) for step in (10, 20, 30)]
    assert decide_local_retention(steps, None, keep=1, lineage=1) == ()


@pytest.mark.parametrize(
    ("lineage", "sealed_lineage", "step", "want"),
    [(1, 1, 10, [10]), (1, 1, 30, []), (2, 1, 10, []), (0, 1, 10, [])],
    ids=["overtaken", "being written", "first save after a rollback", "trainer has not told"],
)
def test_local_save_without_any_seal_goes_once_its_lineage_went_on(
    make: Any, lineage: int, sealed_lineage: int, step: int, want: list[int]
) -> None:
    steps = [make.view(step, lineage=None, sealed={}), make.view(20, lineage=sealed_lineage)]
    assert steps_of(decide_local_retention(steps, make.remote(), keep=1, lineage=lineage)) == want


@pytest.mark.parametrize(
    ("phases", "want"),
    [
        ({"": Phase.TRAINING}, False),
        ({"": Phase.RESTORING}, True),
        ({"": Phase.STARTING}, True),
        ({"": Phase.TRAINING, "other": Phase.RESTORING}, True),
        ({"other": Phase.TRAINING}, True),
        ({}, True),
    ],
    ids=["trains", "restores", "starts", "a neighbour restores", "own one silent", "no word yet"],
)
def test_a_trainer_counts_as_restoring_until_its_own_says_otherwise(
    make: Any, phases: dict[str, Phase], want: bool
) -> None:
    states = {
        rank: make.state(rank=rank, pod_uid=pod, phase=phase)
        for rank, (pod, phase) in enumerate(phases.items())
    }
    assert is_restoring(states, "") is want


def test_a_neighbour_that_fell_silent_while_restoring_is_gone(make: Any) -> None:
    old = make.state().written_at
    states = {
        0: make.state(rank=0, written_at=old + timedelta(minutes=10)),
        1: make.state(rank=1, pod_uid="gone", phase=Phase.RESTORING, written_at=old),
    }
    assert not is_restoring(states, "")
    assert is_restoring(states, "gone")


@st.composite
def tiers(draw: st.DrawFn) -> list[tuple[int, int, bool, bool, float]]:
    """(step, lineage, committed, in trash, age) of a few steps."""
    return draw(
        st.lists(
            st.tuples(
                st.integers(1, 9),
                st.integers(1, 3),
                st.booleans(),
                st.booleans(),
                st.floats(0, 2 * TRASH_GRACE_SECONDS),
            ),
            max_size=8,
            unique_by=lambda item: item[:2],
        )
    )


@settings(deadline=None)
@given(tiers(), st.integers(0, 4))
def test_remote_retention_never_loses_the_newest_good_commit(
    make: Any, found: list[tuple[int, int, bool, bool, float]], keep: int
) -> None:
    steps, ages = [], {}
    for step, lineage, committed, trashed, age in found:
        attempt = make.attempt(step, nonce=lineage)
        build = make.commit if committed else make.view
        view = build(step, attempt=attempt, lineage=lineage)
        steps.append(in_trash(view) if trashed else view)
        ages[attempt] = age
    before = make.remote(*steps, trash_age_seconds=ages)
    plan = decide_remote_retention(before, keep)
    good = [step for step in before.steps if step.commit]
    newest = max(good, key=lambda step: before.key(step) or (0, 0, ""), default=None)
    if newest is not None:
        assert newest.attempt not in plan.trash + plan.empty
        assert newest.attempt in plan.restore or not newest.is_in_trash
    assert not set(plan.empty) & set(plan.restore)
    assert all(step.is_in_trash for step in before.steps if step.attempt in plan.empty)
    in_flight = [s.attempt for s in before.steps if not s.commit and newest_is_older(before, s)]
    assert not set(in_flight) & set(plan.trash)


def newest_is_older(view: RemoteView, step: StepView) -> bool:
    return view.newest_key is None or (view.key(step) or (0, 0, "")) > view.newest_key


@settings(deadline=None)
@given(tiers(), st.integers(0, 4), st.integers(0, 3))
def test_local_retention_never_takes_the_newest_sealed_or_the_newest_durable(
    make: Any, found: list[tuple[int, int, bool, bool, float]], keep: int, lineage: int
) -> None:
    local, far = [], []
    for step, number, committed, only_far, _ in found:
        attempt = make.attempt(step, nonce=number)
        if committed:
            far.append(make.commit(step, attempt=attempt, lineage=number))
        if not (committed and only_far):
            local.append(make.view(step, attempt=attempt, lineage=number))
    view = make.remote(*far)
    gone = decide_local_retention(local, view, keep=keep, lineage=lineage)
    ordered = sorted(local, key=lambda step: view.key(step) or (0, 0, ""))
    durable = [step.attempt for step in ordered if view.find(step.attempt)]
    assert not {step.attempt for step in ordered[-1:]} & set(gone)
    assert not set(durable[-1:]) & set(gone)
    for step in local:
        if step.attempt in gone:
            assert view.newest_key is not None
            assert (view.key(step) or (0, 0, "")) <= view.newest_key
