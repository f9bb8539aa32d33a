from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import TRASH, Attempt, announced_file, seal_file, step_folder
from tidegate_contract.restore_point import (
    Copy,
    Source,
    World,
    copy_of,
    decide_restore_point,
    next_lineage,
)
from tidegate_contract.scan import scan_steps

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
BOTH_FAR = (REMOTE, REMOTE)


def in_trash(copy: Copy) -> Copy:
    return replace(copy, folder=f"{TRASH}/{copy.folder}")


def a_rollback(number: int, step: int) -> LineageClaim:
    return LineageClaim(
        run_id=RUN_ID,
        number=number,
        restored=a_copy(step).attempt,
        explicit=True,
        claimed_at=NOW,
    )


def spread(step: int, nodes: int, without: tuple[int, ...] = ()) -> tuple[tuple[Copy, ...], ...]:
    """A step of one rank per node; some of the nodes have lost it."""
    return tuple(
        () if node in without else (a_copy(step, (node,), world_size=nodes),)
        for node in range(nodes)
    )


SOURCES = [
    pytest.param(a_world(), [], id="nothing anywhere"),
    pytest.param(
        a_world(local=((a_copy(5, (0,)),), (a_copy(5, (1,)),))),
        [(5, (LOCAL, LOCAL))],
        id="both nodes kept their part, nothing durable",
    ),
    pytest.param(
        a_world(local=((a_copy(5, (0,)),), (a_copy(5, (1,)),)), remote=(durable(5),)),
        [(5, (LOCAL, LOCAL))],
        id="the nearest tier is read although the step is durable",
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
        [(5, BOTH_FAR)],
        id="C125: ranks changed nodes, each finds its own shard by its number",
    ),
    pytest.param(
        a_world(local=((a_copy(5, (1,)),), (a_copy(5, (0,)),))),
        [],
        id="C125: ranks changed nodes and nothing is durable",
    ),
    pytest.param(
        a_world(local=((a_copy(5, (0, 1)),), ()), remote=(durable(5),)),
        [(5, (LOCAL, REMOTE))],
        id="a node that saved both ranks has only one of them now",
    ),
    pytest.param(
        a_world(
            local=(
                (a_copy(5, (0,)),),
                (a_copy(5, (1,), attempt=Attempt(step=5, nonce="f" * 16)),),
            )
        ),
        [],
        id="two attempts at one step are never mixed",
    ),
    pytest.param(
        a_world(local=((a_copy(5, (0,)),), (a_copy(5, (1,)),)), remote=None),
        [(5, (LOCAL, LOCAL))],
        id="remote tier unreachable, the nodes hold it all",
    ),
    pytest.param(
        a_world(local=((a_copy(5, (0,)),), ()), remote=None), [], id="remote tier unreachable"
    ),
    pytest.param(
        a_world(
            local=((a_copy(5, (0,), world_size=4),), (a_copy(5, (1,), world_size=4),)),
            remote=(durable(5, world_size=4),),
        ),
        [(5, BOTH_FAR)],
        id="another world size reads the remote tier",
    ),
    pytest.param(
        a_world(
            local=((a_copy(5, (0, 1, 2), world_size=3),), ()),
            remote=(durable(5, ranks=(0, 1, 2), world_size=3),),
        ),
        [(5, (LOCAL, REMOTE))],
        id="another world size, one node holds it all",
    ),
    pytest.param(
        World(
            nodes=tuple(frozenset({rank}) for rank in range(4)),
            local=spread(210, 4, without=(2,)),
            remote=(durable(200, world_size=4),),
        ),
        [(200, (REMOTE,) * 4)],
        id="C126: a node was replaced, the newest durable step and never 0",
    ),
    pytest.param(
        World(
            nodes=tuple(frozenset({rank}) for rank in range(3)),
            local=(
                tuple(a_copy(step, (0,), world_size=3) for step in (15, 14)),
                tuple(a_copy(step, (1,), world_size=3) for step in (14, 13)),
                (),
            ),
            remote=tuple(durable(step, world_size=3) for step in (13, 10)),
        ),
        [(13, (REMOTE, LOCAL, REMOTE)), (10, (REMOTE,) * 3)],
        id="C124: the newest step that every rank has somewhere",
    ),
]

ORDER = [
    pytest.param(
        a_world(remote=tuple(durable(step) for step in (9, 10, 99, 100, 9900, 10_000))),
        [10_000, 9900, 100, 99, 10, 9],
        id="C006: numbers order, not text",
    ),
    pytest.param(
        a_world(remote=(durable(7, lineage=1), durable(5, lineage=2))),
        [5, 7],
        id="a later lineage is newer than a higher step",
    ),
    pytest.param(a_world(remote=(durable(7), durable(5)), step=5), [5], id="C137: an exact step"),
    pytest.param(
        a_world(remote=(durable(7), durable(5)), step=6), [], id="C137: a step that is not there"
    ),
    pytest.param(
        a_world(remote=(in_trash(durable(7)), durable(5))),
        [7, 5],
        id="a commit in .trash is a candidate like all others",
    ),
    pytest.param(
        a_world(remote=(a_copy(5, ()), in_trash(durable(5)))),
        [5],
        id="begun anew while its commit lies in .trash",
    ),
    pytest.param(
        a_world(remote=(durable(5), in_trash(a_copy(5, ())))),
        [5],
        id="committed while an earlier half of it lies in .trash",
    ),
    pytest.param(
        a_world(remote=(durable(7), durable(5)), claims=(a_rollback(2, 5),)),
        [5, 7],
        id="a rollback is not undone by what it rolled back",
    ),
    pytest.param(
        a_world(
            remote=(durable(9), durable(7), durable(6, lineage=2), durable(5)),
            claims=(a_rollback(2, 5),),
        ),
        [6, 5, 9, 7],
        id="what was saved since the rollback is newer than its step",
    ),
    pytest.param(
        a_world(
            remote=(durable(7), durable(5), durable(3)),
            claims=(a_rollback(2, 3), a_rollback(3, 5)),
        ),
        [5, 3, 7],
        id="the later of two rollbacks counts",
    ),
    pytest.param(
        a_world(
            remote=(durable(7), durable(5)),
            claims=(replace(a_rollback(2, 5), explicit=False),),
        ),
        [7, 5],
        id="an automatic restore re-dates nothing",
    ),
    pytest.param(
        a_world(remote=(in_trash(durable(5)), durable(7)), claims=(a_rollback(2, 5),)),
        [5, 7],
        id="a rollback to a step in .trash",
    ),
]


@pytest.mark.parametrize(("world", "want"), SOURCES)
def test_restore_point_reads_each_rank_from_its_nearest_tier(
    world: World, want: list[tuple[int, tuple[Source, ...]]]
) -> None:
    got = decide_restore_point(world)
    assert [(c.attempt.step, c.sources) for c in got.candidates] == want


@pytest.mark.parametrize(("world", "want"), ORDER)
def test_restore_point_takes_the_newest_by_lineage_and_step(world: World, want: list[int]) -> None:
    assert [c.attempt.step for c in decide_restore_point(world).candidates] == want


def test_c125_shard_under_another_ranks_name_is_no_copy_of_either(
    a_step: Callable[..., Folder], tmp_path: Path
) -> None:
    with a_step(ranks=(1,)) as step:
        for name in (seal_file, announced_file):
            step.rename(name(1), name(0))
    with Folder.open(tmp_path) as run:
        (record,) = scan_steps(run, RUN_ID)
    assert copy_of(record) is None
    assert "belongs to another rank" in record.problems[0]


def test_restore_point_names_the_folder_of_each_rank() -> None:
    far = in_trash(durable(5))
    world = a_world(local=((a_copy(5, (0,)),), ()), remote=(far,))
    (candidate,) = decide_restore_point(world).candidates
    assert candidate.folders == (step_folder(far.attempt), far.folder)
    assert candidate.remote_folder == far.folder


def test_restore_point_leaves_a_local_copy_that_failed_to_the_remote_tier() -> None:
    local = ((a_copy(5, (0,)),), (a_copy(5, (1,)),))
    world = a_world(local=local, remote=(durable(5),))
    failed = {(1, a_copy(5).attempt): "rank 1: Input/output error"}
    (candidate,) = decide_restore_point(replace(world, failed_local=failed)).candidates
    assert candidate.sources == (LOCAL, REMOTE)
    got = decide_restore_point(replace(world, failed_local=failed, remote=()))
    assert got.candidates == ()
    assert "rank 1 has no whole local copy (rank 1: Input/output error)" in got.refused[0][1]


def test_restore_point_names_few_of_many_ranks_that_lack_a_step() -> None:
    nodes = tuple(frozenset(range(8 * node, 8 * node + 8)) for node in range(4))
    local: tuple[tuple[Copy, ...], ...] = ((a_copy(5, tuple(range(8)), world_size=32),), (), (), ())
    got = decide_restore_point(World(nodes=nodes, local=local, remote=()))
    want = "ranks [8, 9, 10, 11, 12, 13, 14, 15] and 16 more have no whole local copy and it is not"
    assert want in got.refused[0][1]


def test_restore_point_says_why_a_newer_step_was_refused() -> None:
    world = a_world(local=((a_copy(6, (0,)),), ()), remote=(durable(5),))
    ((attempt, why),) = decide_restore_point(world).refused
    assert attempt.step == 6
    assert "rank 1 has no whole local copy" in why


def test_restore_point_waits_only_for_a_newer_announced_step() -> None:
    announced = a_copy(6, is_announced=True)
    world = a_world(remote=(announced, durable(5)))
    assert decide_restore_point(world).pending == announced.attempt
    older = replace(announced, attempt=Attempt(step=4, nonce="0" * 16))
    assert decide_restore_point(replace(world, remote=(older, durable(5)))).pending is None
    moved = in_trash(announced)
    assert decide_restore_point(replace(world, remote=(moved, durable(5)))).pending is None
    lost_a_file = replace(announced, ranks=frozenset({0}))
    assert decide_restore_point(replace(world, remote=(lost_a_file,))).pending == announced.attempt


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
            held = {c.attempt for c in local[rank] if c.ranks in ({rank}, {0, 1})}
            committed = {c.attempt for c in remote if c.is_committed}
            assert candidate.attempt in (held if source is LOCAL else committed)
    offered = [(c.lineage, c.attempt.step) for c in got.candidates]
    assert offered == sorted(offered, reverse=True)
