"""Claims that are damaged or cannot be read: retention takes nothing that they may have named."""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_contract.folder import ENTRY_ERRORS, Folder
from tidegate_contract.identity import UNTOLD, LineageClaim, Trained
from tidegate_contract.layout import LINEAGES, TRASH, Attempt, lineage_file, step_folder
from tidegate_contract.publish import claim_lineage, note_trained
from tidegate_contract.wire import Policy
from tidegate_sidecar.decide import Facts
from tidegate_sidecar.report import Speaker, build_report
from tidegate_sidecar.retention import (
    TRASH_GRACE_SECONDS,
    decide_local_retention,
    decide_remote_retention,
)
from tidegate_sidecar.tasks import CopyRanks
from tidegate_sidecar.transfer import Meter, TokenBucket
from tidegate_sidecar.view import RemoteView, StepView

Build = Callable[..., Any]
RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
OF_TIER = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)


def a_claim(number: int, restored: Attempt | None = None, **changes: Any) -> LineageClaim:
    fields = {"run_id": RUN_ID, "number": number, "restored": restored, "claimed_at": NOW}
    return LineageClaim(**(fields | changes))


def a_lost_claim(number: int) -> LineageClaim:
    return a_claim(number, claimed_at=UNTOLD)


@pytest.fixture
def rolled_back(a_run: Build, a_sealed_step: Build) -> tuple[Any, LineageClaim]:
    """A run with durable steps 10 and 20, and the claim of a person who went back to 10."""
    run = a_run()
    attempts = [a_sealed_step(run.locals[0], step, size=100) for step in (10, 20)]
    tier = run.tier()
    for attempt in attempts:
        task = CopyRanks(
            attempt=attempt, ranks=frozenset({0, 1}), bytes_per_second=None, files_at_once=2
        )
        tier.copy(task, Meter(TokenBucket(None), threading.Event(), lambda _: None))
        tier.commit(attempt, NOW)
    claim = a_claim(2, attempts[0], explicit=True)
    with Folder.open(run.remote) as folder:
        assert claim_lineage(folder, claim)
    return run, claim


def damage(run: Any) -> None:
    path = run.remote / LINEAGES / lineage_file(2)
    path.write_bytes(path.read_bytes()[:50])


def look(run: Any) -> RemoteView:
    return run.tier().look(lambda: None)


def steps_of(attempts: tuple[Attempt, ...]) -> list[int]:
    return sorted(attempt.step for attempt in attempts)


def gone(run: Any, make: Any) -> tuple[list[int], list[int]]:
    """What retention takes on the remote tier and on a node, where one step is kept."""
    view = look(run)
    near = [make.view(10), make.view(20)]
    local = decide_local_retention(near, view, keep=1, lineage=2)
    return steps_of(decide_remote_retention(view, 1).trash), steps_of(local)


def test_rollback_whose_claim_is_whole_makes_the_newer_step_needless(
    rolled_back: tuple[Any, LineageClaim], make: Any
) -> None:
    run, _ = rolled_back
    assert gone(run, make) == ([20], [20])


def test_rollback_whose_claim_is_damaged_and_untold_keeps_every_step(
    rolled_back: tuple[Any, LineageClaim], make: Any
) -> None:
    run, _ = rolled_back
    damage(run)
    assert gone(run, make) == ([], [])


def test_rollback_whose_claim_is_damaged_holds_by_its_word(
    rolled_back: tuple[Any, LineageClaim], make: Any
) -> None:
    run, claim = rolled_back
    with Folder.open(run.remote) as folder:
        word = {"restored": claim.restored, "explicit": True, "trained_at": NOW}
        assert note_trained(folder, Trained(run_id=RUN_ID, number=2, **word))
    damage(run)
    assert gone(run, make) == ([20], [20])


def test_rollback_whose_claim_is_damaged_holds_by_this_nodes_mirror(
    rolled_back: tuple[Any, LineageClaim], make: Any
) -> None:
    run, claim = rolled_back
    with Folder.open(run.locals[0]) as folder:
        assert claim_lineage(folder, claim)
    damage(run)
    assert gone(run, make) == ([20], [20])


def test_what_a_restore_without_the_remote_tier_goes_on_from_stays(
    rolled_back: tuple[Any, LineageClaim], make: Any
) -> None:
    """Its claim lies on the node alone."""
    run, claim = rolled_back
    (run.remote / LINEAGES / lineage_file(2)).unlink()
    with Folder.open(run.locals[0]) as folder:
        assert claim_lineage(folder, replace(claim, explicit=False))
    assert gone(run, make) == ([], [])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_mirror_that_cannot_be_read_stops_no_look(
    rolled_back: tuple[Any, LineageClaim], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run, claim = rolled_back
    with Folder.open(run.locals[0]) as folder:
        assert claim_lineage(folder, claim)
    whole = Folder.child

    def child(folder: Folder, name: str) -> Folder:
        if name == LINEAGES and folder.path == str(run.locals[0]):
            raise OSError(number, os.strerror(number), name)
        return whole(folder, name)

    monkeypatch.setattr(Folder, "child", child)
    assert look(run).claims == (claim,)


@pytest.mark.parametrize("number", [*sorted(ENTRY_ERRORS), *OF_TIER], ids=errno.errorcode.get)
def test_claim_that_cannot_be_read_stops_no_look_and_a_tier_that_fails_is_told(
    rolled_back: tuple[Any, LineageClaim], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run, _ = rolled_back
    whole = Folder.read

    def read(folder: Folder, name: str, *rest: int) -> bytes | None:
        if name == lineage_file(2):
            raise OSError(number, os.strerror(number), name)
        return whole(folder, name, *rest)

    monkeypatch.setattr(Folder, "read", read)
    if number in OF_TIER:
        with pytest.raises(OSError, match=os.strerror(number)):
            look(run)
        return
    view = look(run)
    assert view.newest is not None
    assert [claim.number for claim in view.claims] == [2]
    assert not decide_remote_retention(view, 1).is_needed


@pytest.mark.parametrize(
    ("own", "want"),
    [([], []), ([(15, 2)], [10, 20]), ([(25, 1)], []), ([(15, 3)], [10, 20])],
    ids=["no commit", "of its lineage", "of an older lineage", "of a newer lineage"],
)
def test_retention_waits_until_the_lost_claims_lineage_or_a_newer_one_has_a_commit(
    make: Any, own: list[tuple[int, int]], want: list[int]
) -> None:
    steps = [make.commit(10), make.commit(20), *(make.commit(s, lineage=n) for s, n in own)]
    view = make.remote(*steps, claims=(a_lost_claim(2),))
    assert steps_of(decide_remote_retention(view, 1).trash) == want
    near = [make.view(10), make.view(20), *(make.view(s, lineage=n) for s, n in own)]
    assert steps_of(decide_local_retention(near, view, keep=1, lineage=2)) == want


def in_trash(step: StepView) -> StepView:
    return replace(step, folder=f"{TRASH}/{step_folder(step.attempt)}")


def test_trash_is_not_emptied_while_retention_waits_but_the_newest_step_comes_back(
    make: Any,
) -> None:
    ages = {make.attempt(step): 2 * TRASH_GRACE_SECONDS for step in (10, 30)}
    steps = [in_trash(make.commit(10)), make.commit(20), in_trash(make.commit(30))]
    view = make.remote(*steps, claims=(a_lost_claim(2),), trash_age_seconds=ages)
    plan = decide_remote_retention(view, 1)
    assert (steps_of(plan.trash), steps_of(plan.restore), plan.empty) == ([], [30], ())


def test_what_a_crash_left_half_emptied_is_removed_while_retention_waits(make: Any) -> None:
    view = make.remote(make.commit(20), claims=(a_lost_claim(2),), half_emptied=(make.attempt(10),))
    assert decide_remote_retention(view, 1).empty == (make.attempt(10),)


@pytest.mark.parametrize(
    ("claims", "want"),
    [((), ""), ((a_lost_claim(2),), "lineages/2.json is damaged"), ((a_claim(2),), "")],
    ids=["no claim", "lost", "whole"],
)
def test_report_says_why_retention_waits(
    a_run: Build, make: Any, claims: tuple[LineageClaim, ...], want: str
) -> None:
    who = Speaker(settings=a_run().settings(), run_id=RUN_ID, request_id=0)
    facts = Facts(policy=Policy(), local=(), remote=make.remote(make.commit(10), claims=claims))
    report = build_report(who, facts, (), 0, None)
    assert report.remote_reason == "OK"
    assert want in report.remote_message
    assert bool(report.remote_message) is bool(want)


@st.composite
def a_tier_of_claims(draw: st.DrawFn, make: Any) -> tuple[RemoteView, LineageClaim]:
    """Steps of some lineages, a claim for each restore, and which of those is lost.

    What a lineage saves comes after what its restore began from.
    """
    steps: list[StepView] = []
    claims: list[LineageClaim] = []
    for lineage in range(1, draw(st.integers(2, 4)) + 1):
        held = draw(st.sampled_from([s.attempt for s in steps])) if steps else None
        is_explicit = held is not None and draw(st.booleans())
        claims.append(a_claim(lineage, held, explicit=is_explicit))
        first = held.step + 1 if held else 1
        for step in draw(st.lists(st.integers(first, first + 5), max_size=3, unique=True)):
            attempt = make.attempt(step, nonce=lineage * 100 + step)
            build = draw(st.sampled_from((make.commit, make.commit, make.view)))
            view = build(step, attempt=attempt, lineage=lineage)
            steps.append(in_trash(view) if draw(st.booleans()) else view)
    ages = {step.attempt: draw(st.sampled_from((0.0, 2 * TRASH_GRACE_SECONDS))) for step in steps}
    view = make.remote(*steps, claims=tuple(claims), trash_age_seconds=ages)
    assert isinstance(view, RemoteView)
    return view, draw(st.sampled_from(claims))


def newest_of(view: RemoteView, steps: list[StepView]) -> set[Attempt]:
    newest = max(steps, key=lambda step: view.key(step) or (0, 0, ""), default=None)
    return {newest.attempt} if newest else set()


@given(data=st.data(), keep=st.integers(0, 3))
def test_retention_never_takes_what_the_lost_claim_really_held(
    make: Any, data: st.DataObject, keep: int
) -> None:
    """Judged by the whole claims, which retention does not see."""
    truth, lost = data.draw(a_tier_of_claims(make))
    claims = tuple(a_lost_claim(c.number) if c == lost else c for c in truth.claims)
    seen = make.remote(*truth.steps, claims=claims, trash_age_seconds=truth.trash_age_seconds)
    must_stay = newest_of(truth, [step for step in truth.steps if step.commit]) | {truth.base}

    plan = decide_remote_retention(seen, keep)

    assert not must_stay & {*plan.trash, *plan.empty}
    local = [replace(step, commit=None, folder=step_folder(step.attempt)) for step in truth.steps]
    durable = [step for step in local if (f := truth.find(step.attempt)) and f.commit]
    must_stay = newest_of(truth, local) | newest_of(truth, durable) | {truth.base}
    assert not must_stay & set(decide_local_retention(local, seen, keep=keep, lineage=1))
