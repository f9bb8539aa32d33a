"""Steps whose restore fails again and again."""

from dataclasses import replace
from datetime import UTC, datetime
from itertools import product

import pytest

from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import Attempt, step_folder
from tidegate_contract.restore_point import (
    Copy,
    World,
    decide_restore_point,
    find_failed_tries,
)

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
FIVE, SEVEN = (Attempt(step=step, nonce=f"{step:016x}") for step in (5, 7))


def a_commit(attempt: Attempt, lineage: int = 1) -> Copy:
    return Copy(
        attempt=attempt,
        lineage=lineage,
        tokens=attempt.step,
        world_size=1,
        ranks=frozenset({0}),
        is_committed=True,
        is_announced=True,
        folder=step_folder(attempt),
    )


def claims_of(*restored: Attempt | None, explicit: int | None = None) -> tuple[LineageClaim, ...]:
    """Claims of lineages 2, 3, …; `explicit` is the number of the one that a person asked for."""
    return tuple(
        LineageClaim(
            run_id="r", number=number, restored=attempt, explicit=number == explicit, claimed_at=NOW
        )
        for number, attempt in enumerate(restored, start=2)
    )


def a_world(*claims: LineageClaim, max_tries: int | None = 3, **changes: object) -> World:
    world = World(
        nodes=(frozenset({0}),),
        local=((),),
        remote=(a_commit(FIVE), a_commit(SEVEN)),
        claims=claims,
        max_tries=max_tries,
    )
    return replace(world, **changes)  # type: ignore[arg-type]


def saved_in(lineage: int) -> Copy:
    """One rank's seal of a later save that nobody completed."""
    attempt = Attempt(step=9, nonce="9" * 16)
    return replace(a_commit(attempt, lineage), is_committed=False, is_announced=False)


@pytest.mark.parametrize(
    ("world", "want"),
    [
        pytest.param(a_world(), 7, id="never tried"),
        pytest.param(a_world(*claims_of(SEVEN, SEVEN)), 7, id="failed twice"),
        pytest.param(a_world(*claims_of(*[SEVEN] * 3)), 5, id="C122: failed three times"),
        pytest.param(a_world(*claims_of(*[SEVEN] * 3), max_tries=4), 7, id="four are allowed"),
        pytest.param(a_world(*claims_of(SEVEN), max_tries=1), 5, id="one is allowed"),
        pytest.param(a_world(*claims_of(*[SEVEN] * 3), max_tries=None), 7, id="nothing counts"),
        pytest.param(
            a_world(*claims_of(*[SEVEN] * 4), trained=frozenset({3})),
            7,
            id="C122: the second try came back to training, two since",
        ),
        pytest.param(
            a_world(*claims_of(*[SEVEN] * 4), trained=frozenset({2})),
            5,
            id="three since the one that trained",
        ),
        pytest.param(
            a_world(*claims_of(*[SEVEN] * 5), trained=frozenset({2, 3, 4, 5, 6}), max_tries=1),
            7,
            id="preempted before each save, but it trained each time",
        ),
        pytest.param(
            a_world(
                *claims_of(*[SEVEN] * 3), remote=(a_commit(FIVE), a_commit(SEVEN), saved_in(4))
            ),
            7,
            id="the third try led to a save, though to no whole one",
        ),
        pytest.param(
            a_world(*claims_of(SEVEN, SEVEN, SEVEN, FIVE), trained=frozenset({5})),
            5,
            id="that an older step could be trained from proves nothing for the newer",
        ),
        pytest.param(a_world(*claims_of(SEVEN, None, None, None)), 7, id="fresh starts count not"),
        pytest.param(
            a_world(*claims_of(SEVEN, SEVEN, SEVEN), running=frozenset({4})),
            7,
            id="this very restore has claimed the third",
        ),
        pytest.param(
            a_world(*reversed(claims_of(*[SEVEN] * 4)), trained=frozenset({2})),
            5,
            id="claims in any order",
        ),
        pytest.param(
            a_world(*claims_of(*[SEVEN] * 3), step=7),
            7,
            id="a person names it: restored all the same",
        ),
        pytest.param(
            a_world(*claims_of(*[FIVE] * 5, explicit=2)),
            5,
            id="a rollback whose step fails is not undone by that",
        ),
    ],
)
def test_step_that_failed_too_often_in_a_row_is_not_offered(world: World, want: int) -> None:
    assert decide_restore_point(world).candidates[0].attempt.step == want


def test_step_set_aside_is_told_with_its_tries() -> None:
    got = decide_restore_point(a_world(*claims_of(*[SEVEN] * 3)))
    assert got.refused == (
        (SEVEN, "its restore was tried 3 times in a row and never came back to training"),
    )
    assert got.set_aside == {SEVEN}
    assert got.order == (SEVEN, FIVE)


def test_steps_that_all_failed_leave_no_candidate_but_are_known_as_set_aside() -> None:
    got = decide_restore_point(a_world(*claims_of(*[SEVEN] * 3, *[FIVE] * 3)))
    assert got.candidates == ()
    assert got.set_aside == {FIVE, SEVEN}


def test_step_that_cannot_be_opened_is_not_set_aside_but_refused_for_that() -> None:
    world = a_world(
        *claims_of(*[SEVEN] * 3), remote=(replace(a_commit(SEVEN), is_committed=False),)
    )
    got = decide_restore_point(world)
    assert got.set_aside == set()
    assert "it is not durable" in got.refused[0][1]


def test_tries_of_a_step_are_counted_for_its_next_claim() -> None:
    world = a_world(*claims_of(SEVEN, FIVE, SEVEN), trained=frozenset({3}))
    assert find_failed_tries(world) == {SEVEN: 2, FIVE: 0}


OUTCOMES = ("died", "trained", "saved")


def test_every_short_history_is_judged_as_by_reading_it_backwards() -> None:
    """All histories of up to four restores of two steps, each with one of three ends."""
    count = 0
    for length in range(5):
        for history in product(product((FIVE, SEVEN), OUTCOMES), repeat=length):
            claims = claims_of(*(attempt for attempt, _ in history))
            ends = {claim.number: end for claim, (_, end) in zip(claims, history, strict=True)}
            saved = [saved_in(number) for number, end in ends.items() if end == "saved"]
            world = a_world(
                *claims,
                max_tries=2,
                trained=frozenset(number for number, end in ends.items() if end == "trained"),
                remote=(a_commit(FIVE), a_commit(SEVEN), *saved),
            )
            tired = {a for a in (FIVE, SEVEN) if _died_last([e for b, e in history if b == a], 2)}
            assert decide_restore_point(world).set_aside == tired, history
            count += 1
    assert count == sum(6**length for length in range(5))


def _died_last(ends: list[str], times: int) -> bool:
    return len(ends) >= times and ends[-times:] == ["died"] * times
