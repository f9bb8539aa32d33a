from collections.abc import Callable, Iterable
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
    RemotePlan,
    decide_local_retention,
    decide_remote_retention,
    is_restoring,
)
from tidegate_sidecar.view import Key, RemoteView, StepView

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
    ("steps", "pinned", "want"),
    [
        pytest.param([10, 20, 30], [10], ([20], [], []), id="C137: about to be moved"),
        pytest.param([-10, 20, 30], [10], ([20], [10], []), id="C137: moved already"),
        pytest.param([-10, -20, 30], [20], ([], [20], [10]), id="one of two in .trash"),
        pytest.param([-10, 10, 30], [10], ([], [], []), id="moved, and being copied anew"),
        pytest.param([10, 30], [20], ([10], [], []), id="of a step that is not there"),
        pytest.param([-10], [10], ([], [10], []), id="the only commit, in .trash"),
    ],
)
def test_pinned_step_is_neither_moved_nor_emptied_and_comes_back(
    make: Any, steps: list[int], pinned: list[int], want: tuple[list[int], ...]
) -> None:
    """Negative numbers lie in `.trash`, beyond its grace."""
    views = [in_trash(make.commit(-s)) if s < 0 else make.commit(s) for s in steps]
    if steps[1:] and steps[0] == -steps[1]:
        views[1] = make.view(steps[1], sealed={})
    ages = {make.attempt(-step): 2 * TRASH_GRACE_SECONDS for step in steps if step < 0}
    pins = frozenset(map(make.attempt, pinned))
    plan = decide_remote_retention(make.remote(*views, trash_age_seconds=ages, pins=pins), 1)
    assert tuple(map(steps_of, (plan.trash, plan.restore, plan.empty))) == want


def a_claim(make: Any, number: int, step: int, **changes: Any) -> LineageClaim:
    now = make.commit(step).commit.committed_at
    fields = {"run_id": "r", "number": number, "restored": make.attempt(step), "claimed_at": now}
    return LineageClaim(**(fields | changes))


@pytest.mark.parametrize(
    ("own", "want"),
    [([], []), ([(15, 2)], [10, 20])],
    ids=["until its lineage has a commit", "not after that"],
)
def test_step_that_training_goes_on_from_stays_though_a_newer_one_is_durable(
    make: Any, own: list[tuple[int, int]], want: list[int]
) -> None:
    """Step 20 could not be restored, so the run went on from 10: keep 1 must not take that."""
    steps = [make.commit(10), make.commit(20)]
    steps += [make.commit(step, lineage=lineage) for step, lineage in own]
    view = make.remote(*steps, claims=(a_claim(make, 2, 10),))
    assert steps_of(decide_remote_retention(view, 1).trash) == want
    near = [make.view(10), make.view(20), *(make.view(s, lineage=n) for s, n in own)]
    assert steps_of(decide_local_retention(near, view, keep=1, lineage=2)) == want


def test_step_that_training_goes_on_from_comes_back_from_trash(make: Any) -> None:
    ages = {make.attempt(10): 2 * TRASH_GRACE_SECONDS}
    view = make.remote(
        in_trash(make.commit(10)),
        make.commit(20),
        claims=(a_claim(make, 2, 10),),
        trash_age_seconds=ages,
    )
    plan = decide_remote_retention(view, 1)
    assert (steps_of(plan.restore), plan.empty) == ([10], ())


def test_c006_keep_three_keeps_the_highest_numbers(make: Any) -> None:
    steps = (9, 10, 99, 100, 9900, 10_000)
    view = make.remote(*map(make.commit, steps))
    assert steps_of(decide_remote_retention(view, 3).trash) == [9, 10, 99]
    near = list(map(make.view, steps))
    assert steps_of(decide_local_retention(near, view, keep=3, lineage=1)) == [9, 10, 99]


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
def a_tier(draw: st.DrawFn, make: Any) -> RemoteView:
    """A few steps of three lineages, some committed, in `.trash`, pinned, named by a claim."""
    steps, ages = [], {}
    spots = st.tuples(st.integers(1, 6), st.integers(1, 3))
    for step, lineage in draw(st.lists(spots, max_size=8, unique=True)):
        attempt = make.attempt(step, nonce=lineage)
        build = draw(st.sampled_from((make.commit, make.view)))
        view = build(step, attempt=attempt, lineage=lineage)
        steps.append(in_trash(view) if draw(st.booleans()) else view)
        ages[attempt] = draw(st.floats(0, 2 * TRASH_GRACE_SECONDS))
    named = st.sampled_from([step.attempt for step in steps]) if steps else st.none()
    claims = [
        a_claim(make, number, 1, restored=attempt, explicit=draw(st.booleans()))
        for number, attempt in enumerate(draw(st.lists(named, max_size=3)), start=2)
    ]
    pins = frozenset(draw(st.sets(named, max_size=2)) - {None})
    built = make.remote(*steps, claims=tuple(claims), trash_age_seconds=ages, pins=pins)
    assert isinstance(built, RemoteView)
    return built


@pytest.fixture(scope="session")
def tiers(make: Any) -> Any:
    return a_tier(make)


def applied(make: Any, view: RemoteView, plan: RemotePlan) -> Any:
    """The tier after a plan was carried out."""
    steps = []
    for step in view.steps:
        if step.attempt in plan.empty and step.is_in_trash:
            continue
        if step.attempt in plan.trash:
            step = in_trash(step)
        elif step.attempt in plan.restore:
            step = replace(step, folder=step_folder(step.attempt))
        steps.append(step)
    ages = {a: 0.0 if a in plan.trash else age for a, age in view.trash_age_seconds.items()}
    return make.remote(*steps, claims=view.claims, trash_age_seconds=ages, pins=view.pins)


def key_of(view: RemoteView, step: StepView) -> Key:
    key = view.key(step)
    assert key is not None
    return key


def newest_of(view: RemoteView, steps: Iterable[StepView]) -> set[Attempt]:
    newest = max(steps, key=lambda step: key_of(view, step), default=None)
    return {newest.attempt} if newest else set()


def is_newest(view: RemoteView, step: StepView) -> bool:
    return view.newest_key is None or key_of(view, step) > view.newest_key


KEEP = st.integers(0, 4)


@settings(deadline=None)
@given(data=st.data(), keep=KEEP)
def test_remote_retention_never_loses_what_it_must_keep(
    make: Any, tiers: Any, data: st.DataObject, keep: int
) -> None:
    view = data.draw(tiers)
    plan = decide_remote_retention(view, keep)
    good = [step for step in view.steps if step.commit]
    coming = [s for s in view.steps if not s.commit and not s.is_in_trash and is_newest(view, s)]
    lost = set(plan.trash + plan.empty)
    assert not lost & newest_of(view, good)
    assert not lost & (view.pins | {view.base})
    assert not lost & {step.attempt for step in coming}
    assert set(plan.empty) <= {step.attempt for step in view.steps if step.is_in_trash}
    after = {step.attempt for step in applied(make, view, plan).steps if not step.is_in_trash}
    assert newest_of(view, good) | (view.pins & {s.attempt for s in view.steps}) <= after


@settings(deadline=None)
@given(data=st.data(), keep=KEEP)
def test_remote_retention_comes_to_rest_and_keeps_as_many_as_it_is_told(
    make: Any, tiers: Any, data: st.DataObject, keep: int
) -> None:
    view = data.draw(tiers)
    for _ in range(3):
        view = applied(make, view, decide_remote_retention(view, keep))
    assert not decide_remote_retention(view, keep).is_needed
    left = [step for step in view.steps if step.commit and not step.is_in_trash]
    extra = {step.attempt for step in left} - (view.pins | {view.base})
    assert len(extra) <= max(1, keep)


@settings(deadline=None)
@given(data=st.data(), keep=KEEP)
def test_retention_is_the_same_whatever_the_order_of_what_it_sees(
    tiers: Any, data: st.DataObject, keep: int
) -> None:
    view: RemoteView = data.draw(tiers)
    mixed = replace(
        view,
        steps=tuple(data.draw(st.permutations(view.steps))),
        claims=tuple(data.draw(st.permutations(view.claims))),
    )
    plans = [decide_remote_retention(seen, keep) for seen in (view, mixed)]
    sets = [tuple(map(set, (p.trash, p.restore, p.empty))) for p in plans]
    assert sets[0] == sets[1]
    assert plans[0].confirm == plans[1].confirm
    near = [step for step in view.steps if not step.is_in_trash]
    gone = [
        decide_local_retention(steps, seen, keep=keep, lineage=1)
        for steps, seen in ((near, view), (near[::-1], mixed))
    ]
    assert gone[0] == gone[1]


@settings(deadline=None)
@given(data=st.data(), keep=KEEP, lineage=st.integers(0, 3))
def test_local_retention_never_takes_what_a_restore_would_miss(
    tiers: Any, data: st.DataObject, keep: int, lineage: int
) -> None:
    view: RemoteView = data.draw(tiers)
    near = [replace(step, commit=None, folder=step_folder(step.attempt)) for step in view.steps]
    local = [step for step in near if data.draw(st.booleans())]
    gone = set(decide_local_retention(local, view, keep=keep, lineage=lineage))
    durable = [s for s in local if (far := view.find(s.attempt)) is not None and far.commit]
    assert not gone & newest_of(view, local)
    assert not gone & newest_of(view, durable)
    assert view.base not in gone
    assert all(not is_newest(view, step) for step in local if step.attempt in gone)
    left = [step for step in local if step.attempt not in gone]
    assert decide_local_retention(left, view, keep=keep, lineage=lineage) == ()
