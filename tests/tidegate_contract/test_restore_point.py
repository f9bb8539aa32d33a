from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import Attempt, step_folder
from tidegate_contract.restore_point import (
    Copy,
    Source,
    World,
    decide_restore_point,
    next_lineage,
)

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
NODES = (frozenset({0}), frozenset({1}))


def a_copy(step: int, ranks: tuple[int, ...] = (0, 1), **changes: Any) -> Copy:
    attempt = Attempt(step=step, nonce=f"{step:016x}")
    fields: dict[str, Any] = {
        "attempt": attempt,
        "lineage": 1,
        "tokens": step * 10,
        "world_size": 2,
        "ranks": frozenset(ranks),
        "folder": step_folder(attempt),
    }
    return Copy(**fields | changes)


def durable(step: int, **changes: Any) -> Copy:
    return a_copy(step, is_committed=True, is_announced=True, **changes)


def a_world(
    local: tuple[tuple[Copy, ...], ...] = ((), ()),
    remote: tuple[Copy, ...] | None = (),
    **changes: Any,
) -> World:
    return World(nodes=NODES, local=local, remote=remote, **changes)


LOCAL, REMOTE = Source.LOCAL, Source.REMOTE


@pytest.mark.parametrize(
    ("world", "want"),
    [
        pytest.param(a_world(), [], id="nothing anywhere"),
        pytest.param(
            a_world(local=((a_copy(5, (0,)),), (a_copy(5, (1,)),))),
            [(5, (LOCAL, LOCAL))],
            id="both nodes kept their part, nothing durable",
        ),
        pytest.param(
            a_world(local=((a_copy(5, (0,)),), ()), remote=(durable(5),)),
            [(5, (LOCAL, REMOTE))],
            id="one node lost, its part comes from the remote tier",
        ),
        pytest.param(
            a_world(local=((a_copy(6, (0,)), a_copy(5, (0,))), ()), remote=(durable(5),)),
            [(5, (LOCAL, REMOTE))],
            id="the newer step lost a shard, step back",
        ),
        pytest.param(
            a_world(local=((a_copy(5, (1,)),), (a_copy(5, (0,)),)), remote=(durable(5),)),
            [(5, (REMOTE, REMOTE))],
            id="ranks changed nodes",
        ),
        pytest.param(
            a_world(remote=(durable(10), durable(9), durable(100))),
            [(100, (REMOTE,) * 2), (10, (REMOTE,) * 2), (9, (REMOTE,) * 2)],
            id="numbers order, not text",
        ),
        pytest.param(
            a_world(remote=(durable(7, lineage=1), durable(5, lineage=2))),
            [(5, (REMOTE,) * 2), (7, (REMOTE,) * 2)],
            id="a later lineage is newer than a higher step",
        ),
        pytest.param(
            a_world(remote=(durable(7), durable(5)), step=5),
            [(5, (REMOTE,) * 2)],
            id="an exact step",
        ),
        pytest.param(
            a_world(local=((a_copy(5, (0,)),), (a_copy(5, (1,)),)), remote=None),
            [(5, (LOCAL, LOCAL))],
            id="remote tier unreachable",
        ),
        pytest.param(
            a_world(
                local=((a_copy(5, (0,), world_size=4),), (a_copy(5, (1,), world_size=4),)),
                remote=(durable(5, world_size=4),),
            ),
            [(5, (REMOTE, REMOTE))],
            id="another world size reads the remote tier",
        ),
        pytest.param(
            a_world(
                remote=(durable(7), durable(5)),
                claims=(
                    LineageClaim(
                        run_id=RUN_ID,
                        number=2,
                        restored=durable(5).attempt,
                        explicit=True,
                        claimed_at=NOW,
                    ),
                ),
            ),
            [(5, (REMOTE,) * 2), (7, (REMOTE,) * 2)],
            id="a rollback is not undone by what it rolled back",
        ),
    ],
)
def test_restore_point_of_a_world(world: World, want: list[tuple[int, tuple[Source, ...]]]) -> None:
    got = decide_restore_point(world)
    assert [(c.attempt.step, c.sources) for c in got.candidates] == want


def test_restore_point_says_why_a_newer_step_was_refused() -> None:
    world = a_world(local=((a_copy(6, (0,)),), ()), remote=(durable(5),))
    ((attempt, why),) = decide_restore_point(world).refused
    assert attempt.step == 6
    assert "ranks [1] have no whole local copy" in why


def test_restore_point_waits_only_for_a_newer_announced_step() -> None:
    announced = a_copy(6, is_announced=True)
    world = a_world(remote=(announced, durable(5)))
    assert decide_restore_point(world).pending == announced.attempt
    older = replace(announced, attempt=Attempt(step=4, nonce="0" * 16))
    assert decide_restore_point(replace(world, remote=(older, durable(5)))).pending is None


def test_lineage_is_above_all_claims_and_seals() -> None:
    claims = [LineageClaim(run_id=RUN_ID, number=4, claimed_at=NOW)]
    assert next_lineage([], []) == 1
    assert next_lineage([a_copy(1, lineage=7)], claims) == 8
    assert next_lineage([a_copy(1)], claims) == 5


ranks = st.sets(st.integers(0, 1)).map(lambda found: tuple(sorted(found)))
copies = st.lists(
    st.builds(
        lambda step, ranks, lineage, committed: a_copy(
            step, ranks, lineage=lineage, is_committed=committed
        ),
        st.integers(1, 3),
        ranks,
        st.integers(1, 2),
        st.booleans(),
    ),
    max_size=3,
    unique_by=lambda copy: copy.attempt,
).map(tuple)


@given(copies, copies, copies)
def test_restore_point_never_offers_what_a_rank_cannot_open(
    near: tuple[Copy, ...], other: tuple[Copy, ...], remote: tuple[Copy, ...]
) -> None:
    local = tuple(
        tuple(replace(copy, is_committed=False) for copy in node) for node in (near, other)
    )
    got = decide_restore_point(a_world(local=local, remote=remote))
    for candidate in got.candidates:
        for rank, source in enumerate(candidate.sources):
            held = {c.attempt for c in local[rank] if c.ranks == frozenset({rank})}
            committed = {c.attempt for c in remote if c.is_committed}
            assert candidate.attempt in (held if source is LOCAL else committed)
    offered = [(c.lineage, c.attempt.step) for c in got.candidates]
    assert offered == sorted(offered, reverse=True)
