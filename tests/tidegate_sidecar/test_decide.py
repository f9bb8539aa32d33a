from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import TRASH
from tidegate_contract.seal import SaveReason
from tidegate_contract.wire import AnswerResult, Policy, SaveAnswer
from tidegate_sidecar.decide import (
    Copy,
    Facts,
    Waiting,
    Why,
    decide_announcement,
    decide_commit,
    decide_copy,
    decide_interruption,
    decide_queue,
    find_lead,
    is_done,
)

Build = Callable[..., Any]
BOTH = frozenset({0, 1})


@pytest.fixture(scope="session")
def the_facts(make: Any) -> Build:
    """Facts of a flusher that has the lock and saw an empty remote tier."""

    def build(*local: Any, **changes: Any) -> Facts:
        fields: dict[str, Any] = {"policy": Policy(), "local": local, "remote": make.remote()}
        return Facts(**(fields | changes))

    return build


def queue_of(facts: Facts) -> list[tuple[int, Why]]:
    return [(item.attempt.step, item.why) for item in decide_queue(facts)]


def announced(step: Any, ranks: frozenset[int] = BOTH, **changes: Any) -> Any:
    return replace(step, announced=ranks, **({"sealed": {}} | changes))


def test_queue_is_newest_first(make: Any, the_facts: Build) -> None:
    facts = the_facts(make.view(10), make.view(30), make.view(20))
    assert [step for step, _ in queue_of(facts)] == [30, 20, 10]


def test_queue_leaves_out_what_a_commit_supersedes(make: Any, the_facts: Build) -> None:
    facts = the_facts(
        make.view(10), make.view(20), make.view(30), remote=make.remote(make.commit(20))
    )
    assert queue_of(facts) == [(30, Why.SCHEDULED)]


def test_queue_orders_by_lineage_before_step(make: Any, the_facts: Build) -> None:
    facts = the_facts(make.view(10, lineage=2), make.view(40), remote=make.remote(make.commit(30)))
    assert [step for step, _ in queue_of(facts)] == [10, 40]


def test_queue_after_an_explicit_restore_leaves_out_the_undone_steps(
    make: Any, the_facts: Build
) -> None:
    claim = LineageClaim(
        run_id="r",
        number=2,
        restored=make.attempt(10),
        explicit=True,
        claimed_at=make.view(10).sealed_at,
    )
    remote = make.remote(make.commit(10), claims=(claim,))
    assert queue_of(the_facts(make.view(10), make.view(20), remote=remote)) == []


@pytest.mark.parametrize(
    ("reason", "named"),
    [(SaveReason.REQUEST, False), (SaveReason.TERMINATION, False), (SaveReason.CADENCE, True)],
    ids=["saved on request", "saved at the end", "named in an answer"],
)
def test_queue_takes_an_urgent_attempt_first_whatever_every_says(
    make: Any, reason: SaveReason, named: bool, the_facts: Build
) -> None:
    answer = SaveAnswer(request_id=7, result=AnswerResult.NOTHING_NEW, attempt=make.attempt(20))
    facts = the_facts(
        make.view(20, reason=reason),
        make.view(30),
        policy=Policy(remote_every=2),
        remote=make.remote(make.commit(10)),
        states={0: make.state(answer=answer if named else None)},
    )
    assert queue_of(facts) == [(20, Why.URGENT), (30, Why.SCHEDULED)]


@pytest.mark.parametrize(
    ("every", "committed", "want"),
    [
        (1, [], [10, 20, 30, 40, 50]),
        (2, [], [10, 30, 50]),
        (2, [10], [30, 50]),
        (3, [10], [40]),
        (10, [10], []),
        (10, [], [10]),
    ],
    ids=["each", "first and every 2nd", "2nd after a commit", "3rd", "10th not there yet", "first"],
)
def test_queue_takes_every_nth(
    make: Any, every: int, committed: list[int], want: list[int], the_facts: Build
) -> None:
    facts = the_facts(
        *(make.view(step) for step in (10, 20, 30, 40, 50)),
        policy=Policy(remote_every=every),
        remote=make.remote(*(make.commit(step) for step in committed)),
    )
    assert sorted(step for step, _ in queue_of(facts)) == want


def test_queue_joins_what_another_node_announced(make: Any, the_facts: Build) -> None:
    far = announced(make.view(20), frozenset({5}), world_size=6)
    facts = the_facts(
        make.view(20, world_size=6),
        policy=Policy(remote_every=10),
        remote=make.remote(make.commit(10), far),
    )
    assert queue_of(facts) == [(20, Why.STARTED)]


def test_queue_drops_older_work_once_all_announced_a_newer_attempt(
    make: Any, the_facts: Build
) -> None:
    far = [announced(make.view(10), frozenset({0})), announced(make.view(20))]
    facts = the_facts(make.view(10), make.view(20), remote=make.remote(*far))
    assert [step for step, _ in queue_of(facts)] == [20]


def test_queue_keeps_older_work_while_a_newer_attempt_is_not_announced_by_all(
    make: Any, the_facts: Build
) -> None:
    far = announced(make.view(20), frozenset({0}))
    facts = the_facts(make.view(10), make.view(20), remote=make.remote(far))
    assert [step for step, _ in queue_of(facts)] == [20, 10]


def test_queue_finishes_what_others_delivered_before_the_newest(
    make: Any, the_facts: Build
) -> None:
    half = announced(make.view(10), sealed={1: 5})
    facts = the_facts(
        make.view(10, sealed={0: 5}),
        make.view(20, sealed={0: 5}),
        remote=make.remote(half, announced(make.view(20))),
    )
    assert queue_of(facts) == [(10, Why.UNDER_WAY), (20, Why.STARTED)]


def test_queue_of_a_finishing_flusher_holds_the_newest_whatever_every_says(
    make: Any, the_facts: Build
) -> None:
    facts = the_facts(
        make.view(20),
        make.view(30),
        policy=Policy(remote_every=10),
        remote=make.remote(make.commit(10)),
        is_finishing=True,
    )
    assert queue_of(facts) == [(30, Why.LAST)]


def test_queue_never_holds_what_was_set_aside_or_refused(make: Any, the_facts: Build) -> None:
    trashed = replace(make.view(10), folder=f"{TRASH}/x")
    facts = the_facts(
        make.view(10),
        make.view(20),
        remote=make.remote(trashed),
        refused=frozenset({make.attempt(20)}),
    )
    assert queue_of(facts) == []


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"remote": None}, Waiting.NO_VIEW),
        ({"holds_lock": False}, Waiting.NOT_HOLDER),
        ({"local": ()}, Waiting.NOTHING),
        ({}, Waiting.NOT_ANNOUNCED),
    ],
    ids=["remote not seen", "lock not held", "nothing sealed", "not announced"],
)
def test_copy_waits(make: Any, changes: dict[str, Any], want: Waiting, the_facts: Build) -> None:
    facts = replace(the_facts(make.view(10)), **changes)
    assert decide_copy(facts, decide_queue(facts)) is want


def test_copy_follows_the_announcement(make: Any, the_facts: Build) -> None:
    facts = the_facts(make.view(10, sealed={0: 5}))
    assert decide_announcement(facts, decide_queue(facts)) == Copy(
        attempt=make.attempt(10), ranks=frozenset({0}), why=Why.SCHEDULED
    )
    facts = replace(facts, remote=make.remote(announced(make.view(10), frozenset({0}))))
    assert decide_announcement(facts, decide_queue(facts)) is None
    assert decide_copy(facts, decide_queue(facts)) == Copy(
        attempt=make.attempt(10), ranks=frozenset({0}), why=Why.STARTED
    )


@pytest.mark.parametrize(
    ("reason", "want"),
    [(SaveReason.CADENCE, 20), (SaveReason.REQUEST, Waiting.NOT_ANNOUNCED)],
    ids=["saved faster than looked", "a drain waits"],
)
def test_copy_takes_what_all_announced_while_a_newer_one_is_not(
    make: Any, the_facts: Build, reason: SaveReason, want: Any
) -> None:
    near = (make.view(10), make.view(20), make.view(30, reason=reason))
    far = make.remote(announced(make.view(10)), announced(make.view(20)))
    facts = the_facts(*near, remote=far)
    found = decide_copy(facts, decide_queue(facts))
    assert (found.attempt.step if isinstance(found, Copy) else found) == want


def test_copy_takes_only_ranks_without_receipt(make: Any, the_facts: Build) -> None:
    facts = the_facts(make.view(10), remote=make.remote(announced(make.view(10), sealed={0: 100})))
    copy = decide_copy(facts, decide_queue(facts))
    assert isinstance(copy, Copy)
    assert copy.ranks == {1}


def test_copy_waits_for_its_turn(make: Any, the_facts: Build) -> None:
    facts = the_facts(
        make.view(10, sealed={1: 5}),
        policy=Policy(nodes_at_once=1),
        remote=make.remote(announced(make.view(10))),
    )
    assert decide_copy(facts, decide_queue(facts)) is Waiting.TURN


@pytest.mark.parametrize(
    ("reason", "current", "want"),
    [
        (SaveReason.REQUEST, Why.SCHEDULED, True),
        (SaveReason.REQUEST, Why.URGENT, False),
        (SaveReason.CADENCE, Why.SCHEDULED, False),
    ],
    ids=["urgent over scheduled", "urgent over urgent", "newer over older"],
)
def test_running_copy_gives_way_only_to_an_urgent_one(
    make: Any, reason: SaveReason, current: Why, want: bool, the_facts: Build
) -> None:
    facts = the_facts(make.view(10), make.view(20, reason=reason))
    copy = Copy(attempt=make.attempt(10), ranks=BOTH, why=current)
    assert decide_interruption(facts, decide_queue(facts), copy) is want


def test_running_copy_stops_once_a_newer_commit_exists(make: Any, the_facts: Build) -> None:
    facts = the_facts(make.view(10), remote=make.remote(make.commit(20)))
    copy = Copy(attempt=make.attempt(10), ranks=BOTH, why=Why.URGENT)
    assert decide_interruption(facts, decide_queue(facts), copy)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"is_lead": True}, 10),
        ({"is_finishing": True}, 10),
        ({}, None),
        ({"complete_seconds": 1.9}, None),
        ({"complete_seconds": 2.0}, 10),
    ],
    ids=["lead at once", "finishing at once", "others wait", "not long enough", "long enough"],
)
def test_commit_is_the_leads_and_then_anyones(
    make: Any, changes: dict[str, Any], want: int | None, the_facts: Build
) -> None:
    if "complete_seconds" in changes:
        changes = {"complete_seconds": {make.attempt(10): changes["complete_seconds"]}}
    facts = the_facts(make.view(10), remote=make.remote(make.view(10, announced=BOTH)), **changes)
    attempt = decide_commit(facts)
    assert (attempt.step if attempt else None) == want


def test_commit_of_a_superseded_attempt_is_left_alone(make: Any, the_facts: Build) -> None:
    remote = make.remote(make.view(10, announced=BOTH), make.commit(20))
    assert decide_commit(the_facts(remote=remote, is_lead=True)) is None


@pytest.mark.parametrize(
    ("far", "holds_lock", "want"),
    [
        ("nothing", True, False),
        ("mine", True, True),
        ("all", True, False),
        ("nothing", False, True),
    ],
    ids=["not copied", "copied, others missing", "complete, not committed", "another flushes"],
)
def test_flusher_is_done(
    make: Any, far: str, holds_lock: bool, want: bool, the_facts: Build
) -> None:
    sealed: dict[int, int] = {"nothing": {}, "mine": {0: 5}, "all": {0: 5, 1: 5}}[far]
    facts = the_facts(
        make.view(10, sealed={0: 5}),
        remote=make.remote(announced(make.view(10), sealed=sealed)),
        holds_lock=holds_lock,
        is_finishing=True,
    )
    assert is_done(facts, decide_queue(facts)) is want


@pytest.mark.parametrize(
    ("ages", "want"),
    [({}, False), ({0: 0}, True), ({1: 0}, False), ({0: 60, 1: 0}, True), ({0: 61, 1: 0}, False)],
    ids=["none", "alone", "others only", "a little older", "outlived"],
)
def test_lead_is_rank_0_unless_the_others_outlived_it(
    make: Any, ages: dict[int, int], want: bool
) -> None:
    now = make.state().written_at
    states = {
        rank: make.state(rank, written_at=now - timedelta(seconds=age))
        for rank, age in ages.items()
    }
    assert (find_lead(states) is not None) is want


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=8, unique_by=lambda i: i[0]),
    st.sets(st.integers(1, 20), max_size=3),
    st.integers(1, 4),
)
def test_queue_never_holds_anything_older_than_the_newest_commit(
    make: Any, the_facts: Build, local: list[tuple[int, bool]], committed: set[int], every: int
) -> None:
    steps = [
        make.view(step, reason=SaveReason.REQUEST if urgent else SaveReason.CADENCE)
        for step, urgent in local
    ]
    remote = make.remote(*(make.commit(step) for step in committed))
    queue = queue_of(the_facts(*steps, policy=Policy(remote_every=every), remote=remote))
    assert all(step > max(committed, default=0) for step, _ in queue)
    urgent = {step for step, is_urgent in local if is_urgent and step > max(committed, default=0)}
    assert {step for step, why in queue if why is Why.URGENT} == urgent
    assert queue[: len(urgent)] == [(step, Why.URGENT) for step in sorted(urgent, reverse=True)]
