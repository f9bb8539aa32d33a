"""`decide_restore_point` in every small world, against an oracle that knows every file."""

from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_contract.layout import Attempt
from tidegate_contract.restore_point import decide_restore_point
from tidegate_crash.restore_oracle import (
    ABSENT,
    ANNOUNCED,
    COMMITTED,
    CORRUPT,
    GOOD,
    MISSING,
    OTHER,
    PARTIAL,
    TRASHED,
    Case,
    Save,
    check,
    expand,
    observe,
)


def an_attempt(step: int, nonce: int = 1) -> Attempt:
    return Attempt(step=step, nonce=f"{nonce:016x}")


def homes(ranks: int) -> list[tuple[int, ...]]:
    """Every way to put ranks on disks; disks have no names, so each partition once."""
    found = []
    for disks in product(range(ranks), repeat=ranks):
        if all(disk <= max(disks[:at], default=-1) + 1 for at, disk in enumerate(disks)):
            found.append(disks)
    return found


def moves(home: tuple[int, ...], ranks: int) -> list[tuple[int, ...]]:
    """Every way to put ranks anew: on disks that hold something, or on a fresh one.

    One fresh disk stands for many: none of them serves anybody.
    """
    return list(product(range(len(set(home)) + 1), repeat=ranks))


def one_step_worlds(saved: int, ranks: int, near: tuple[str, ...], most_bad: int) -> Iterator[Case]:
    """One attempt: all placements then and now, all states of all files on both tiers."""
    fars = all_fars(saved, most_bad=most_bad)
    for home in homes(saved):
        for now in moves(home, ranks):
            for shards, (mark, far) in product(product(near, repeat=saved), fars):
                save = Save(an_attempt(1), 1, home, shards, far, mark)
                yield Case((save,), now)
                if mark == COMMITTED and set(far) == {GOOD}:
                    yield Case((save,), now, is_readable=False)


def all_fars(ranks: int, *, most_bad: int) -> list[tuple[str, tuple[str, ...]]]:
    """Marks with the files beside them, at most so many of them bad (in `.trash`, one less).

    A file of another attempt in a remote folder has the wrong digest: it is a corrupt one. Where
    one is bad, it is that of rank 0 or 1: the other ranks are rank 1 by another name.
    """
    states = [
        files
        for files in product((GOOD, MISSING, CORRUPT), repeat=ranks)
        if sum(state != GOOD for state in files) <= most_bad
        and (most_bad > 1 or set(files[2:]) <= {GOOD})
    ]
    none = (MISSING,) * ranks
    found = [(ABSENT, none), (PARTIAL, none), (ANNOUNCED, none)]
    found += [(COMMITTED, far) for far in states]
    return found + [(TRASHED, far) for far in states if sum(s != GOOD for s in far) < most_bad]


KINDS: dict[str, Callable[[Attempt, int], Save]] = {
    "durable": lambda a, n: Save(a, n, (0, 1), (MISSING,) * 2, (GOOD, GOOD), COMMITTED),
    "in trash": lambda a, n: Save(a, n, (0, 1), (MISSING,) * 2, (GOOD, GOOD), TRASHED),
    "sealed": lambda a, n: Save(a, n, (0, 1), (GOOD, GOOD), (MISSING,) * 2, ABSENT),
    "torn": lambda a, n: Save(a, n, (0, 1), (GOOD, MISSING), (MISSING,) * 2, PARTIAL),
    "on its way": lambda a, n: Save(a, n, (0, 1), (MISSING, GOOD), (MISSING,) * 2, ANNOUNCED),
    "damaged": lambda a, n: Save(a, n, (0, 1), (GOOD, CORRUPT), (GOOD, CORRUPT), COMMITTED),
    "half here": lambda a, n: Save(a, n, (0, 1), (GOOD, OTHER), (GOOD, GOOD), COMMITTED),
}
"""What can become of an attempt, one of each kind; they stand for all worlds of one attempt, as no
answer depends on another attempt's files (`test_attempt_is_judged_alone`)."""


def many_step_worlds(
    lineages: int, steps: int, kinds: tuple[str, ...], rollbacks: int
) -> Iterator[Case]:
    """Three attempts of every kind, lineage and step, and all series of so many rollbacks."""
    places = list(product(range(1, lineages + 1), range(1, steps + 1)))
    for spots in combinations_with_replacement(places, 3):  # the attempts have no names
        attempts = [an_attempt(step, index + 1) for index, (_, step) in enumerate(spots)]
        told = [
            tuple(enumerate(named, start=8))
            for count in range(rollbacks + 1)
            for named in permutations(attempts, count)
        ]
        for names in product(kinds, repeat=3):
            saves = tuple(
                KINDS[name](attempt, lineage)
                for name, attempt, (lineage, _) in zip(names, attempts, spots, strict=True)
            )
            for claims in told:
                yield Case(saves, (0, 1), rollbacks=claims)
            yield Case(saves, (0, 1), is_readable=False)
            yield Case(saves, (0, 1), step=2)


def check_all(cases: Iterator[Case]) -> int:
    count = 0
    for case in cases:
        check(case)
        count += 1
    return count


ALL_STATES = (GOOD, MISSING, CORRUPT, OTHER)


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "ranks", "most_bad", "near", "want"),
    [
        pytest.param(1, 1, 1, ALL_STATES, 64, id="1 rank"),
        pytest.param(2, 2, 2, ALL_STATES, 3_744, id="2 ranks"),
        pytest.param(2, 1, 2, ALL_STATES, 1_440, id="1 rank of 2"),
        pytest.param(2, 3, 2, ALL_STATES[:3], 5_670, id="3 ranks of 2"),
        pytest.param(3, 2, 1, ALL_STATES[:3], 12_690, id="2 ranks of 3, one bad remote file"),
        pytest.param(3, 3, 1, ALL_STATES[:3], 41_310, id="3 ranks, one bad remote file"),
    ],
)
def test_one_step_is_restored_exactly_where_every_rank_finds_its_files(
    record_property: Callable[[str, object], None],
    saved: int,
    ranks: int,
    most_bad: int,
    near: tuple[str, ...],
    want: int,
) -> None:
    cases = one_step_worlds(saved, ranks, near, most_bad)
    record_property("counts", f"{want:,} worlds, each as the oracle says")
    assert check_all(cases) == want


@pytest.mark.long
def test_newest_of_three_steps_is_restored_whatever_became_of_the_others(
    record_property: Callable[[str, object], None],
) -> None:
    cases = many_step_worlds(2, 3, ("durable", "in trash", "sealed", "damaged"), 1)
    record_property("counts", "21,504 worlds, each as the oracle says")
    assert check_all(cases) == 21_504


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_small_world_is_restored_as_the_oracle_says(
    write_result: Callable[[dict[str, object]], None],
) -> None:
    one = sum(
        check_all(one_step_worlds(saved, ranks, ALL_STATES, saved))
        for saved in (1, 2, 3)
        for ranks in (1, 2, 3)
    )
    many = check_all(many_step_worlds(3, 3, tuple(KINDS), 2))
    write_result({"one_step_worlds": one, "three_step_worlds": many, "differences": 0})


@st.composite
def large_worlds(draw: st.DrawFn) -> Case:
    """Up to 8 ranks on 4 disks and 6 attempts, of whatever numbers of ranks."""
    size = draw(st.integers(1, 8))
    saves = []
    for nonce in range(1, draw(st.integers(1, 6)) + 1):
        saved = draw(st.sampled_from((size, size, draw(st.integers(1, 8)))))
        files = st.lists(st.sampled_from((GOOD,) * 7 + ALL_STATES), min_size=saved, max_size=saved)
        far = draw(files.map(lambda f: tuple(CORRUPT if x == OTHER else x for x in f)))
        saves.append(
            Save(
                an_attempt(draw(st.integers(1, 4)), nonce),
                draw(st.integers(1, 3)),
                draw(st.tuples(*[st.integers(0, 3)] * saved)),
                tuple(draw(files)),
                far,
                draw(st.sampled_from((ABSENT, ANNOUNCED, COMMITTED, TRASHED))),
            )
        )
    named = draw(st.lists(st.sampled_from(saves), max_size=2))
    return Case(
        saves=tuple(saves),
        now=draw(st.tuples(*[st.integers(0, 5)] * size)),
        is_readable=draw(st.sampled_from((True, True, False))),
        rollbacks=tuple((4 + i, save.attempt) for i, save in enumerate(named)),
        step=draw(st.sampled_from((None, None, 2))),
    )


@settings(deadline=None)
@given(large_worlds())
def test_larger_world_is_restored_as_the_oracle_says(case: Case) -> None:
    check(case)


@settings(deadline=None)
@given(large_worlds())
def test_attempt_is_judged_alone(case: Case) -> None:
    whole = decide_restore_point(observe(expand(case), {}))
    for save in expand(case).saves:
        alone = decide_restore_point(observe(case._replace(saves=(save,)), {}))
        of_it = [c for c in whole.candidates if c.attempt == save.attempt]
        assert list(alone.candidates) == of_it
        assert list(alone.refused) == [r for r in whole.refused if r[0] == save.attempt]
