"""The scenarios: which two processes meet, on what, and what their second run must leave.

Names follow the table of the model that showed the format's rules to be needed.
"""

from dataclasses import replace

from tidegate_contract.layout import (
    COMMIT,
    MANIFEST,
    METADATA,
    METADATA_REMOTE,
    announced_file,
    seal_file,
)
from tidegate_crash.actors import (
    EMPTY,
    TIDY,
    announced,
    commit,
    committed,
    copy_late,
    damage,
    delivered,
    in_turn,
    make_anew,
    pin,
    recover,
    roll_back,
    sealed,
    start,
    trashed,
)
from tidegate_crash.flusher import Duty, flush
from tidegate_crash.invariants import Settled, check_settled, check_state
from tidegate_crash.restoring import Job, restore
from tidegate_crash.scenario import Actor, Fault, Scenario
from tidegate_crash.stage import FIVE, FIVE_AGAIN, FOUR, NEXT_RUN_ID, NEXT_THREE, SIX

ALL = Duty(tidies_local=True, tidies_remote=True, empties=True)
"""Everything that a lead's sidecar does, a grace after the last move into `.trash`."""
PLAIN = Duty()
_STOPS = frozenset({Fault.KILL, Fault.LATE, Fault.CUT})
_KILLS = frozenset({Fault.KILL, Fault.LATE})
SWAPPED = Job(nodes=(1, 0))
"""Each rank runs where the other saved, so all read from the remote tier."""
EVERYBODY = start(0, 1)


def build_scenario(
    name: str,
    prepare: tuple[Actor, ...],
    actors: tuple[Actor, ...],
    nodes: tuple[int | None, ...],
    duty: Duty = ALL,
    faults: frozenset[Fault] = _STOPS,
) -> Scenario:
    """A scenario of the stage: its run is there, and its second run does all of `duty`."""
    settled = Settled(
        keep=duty.policy.remote_keep if duty.tidies_remote else None, empties=duty.empties
    )
    return Scenario(
        name=name,
        prepare=in_turn(EVERYBODY, *prepare),
        actors=actors,
        nodes=nodes,
        recover=recover(duty),
        check=check_state,
        check_final=check_settled(settled),
        faults=faults,
    )


def saving() -> list[Scenario]:
    """Trainers seal, one flusher copies, committers commit."""
    both = sealed(FIVE)
    return [
        replace(
            build_scenario("birth", (), (start(0), start(1)), (0, 1)),
            prepare=lambda *_: None,
            recover=in_turn(EVERYBODY, both, recover(ALL)),
        ),
        build_scenario(
            "save", (sealed(FIVE, ranks=(1,)),), (sealed(FIVE, ranks=(0,)), flush(0)), (0, 0)
        ),
        build_scenario(
            "flush", (committed(FOUR), both, delivered(FIVE, ranks=(1,))), (flush(0),), (0,)
        ),
        build_scenario("race", (both, delivered(FIVE)), (commit(FIVE), commit(FIVE)), (0, 1)),
        build_scenario(
            "early",
            (both, delivered(FIVE, ranks=(1,)), announced(FIVE, 0)),
            (flush(0, Duty(commits=False)), commit(FIVE)),
            (0, 1),
        ),
    ]


def flushing() -> list[Scenario]:
    """Flushers of both nodes, and two of one node where one takes over from the other."""
    both = sealed(FIVE)
    return [
        build_scenario("flushers", (both,), (flush(0), flush(1)), (0, 1)),
        build_scenario("adopt", (both, delivered(FIVE, ranks=(1,))), (flush(0), flush(0)), (0, 0)),
        build_scenario("adopt-first", (both,), (flush(0), in_turn(flush(0), flush(1))), (0, 0)),
        build_scenario(
            "eio",
            (both, delivered(FIVE, ranks=(1,))),
            (flush(0),),
            (0,),
            faults=frozenset({Fault.EIO, Fault.CUT}),
        ),
        build_scenario(
            "same-step",
            (sealed(FIVE, FIVE_AGAIN), delivered(FIVE, FIVE_AGAIN, ranks=(1,))),
            (flush(0), commit(FIVE, FIVE_AGAIN)),
            (0, 1),
        ),
        build_scenario(
            "disk",
            (committed(FOUR), both),
            (flush(0), flush(1)),
            (0, 1),
            faults=frozenset({Fault.DISK}),
        ),
    ]


def tidying() -> list[Scenario]:
    """Retention beside committers."""
    commits_and_tidies = replace(ALL, copies=False, tidies_local=False)
    return [
        build_scenario(
            "cut",
            (committed(FOUR), sealed(FIVE), delivered(FIVE)),
            (flush(0, replace(commits_and_tidies, empties=False)), commit(FIVE)),
            (0, 1),
        ),
        build_scenario(
            "retention",
            (committed(FOUR), sealed(FIVE), delivered(FIVE)),
            (flush(0, TIDY), commit(FIVE)),
            (0, 1),
        ),
        build_scenario(
            "half",
            (committed(FOUR), sealed(FIVE, ranks=(1,)), delivered(FIVE, ranks=(1,))),
            (flush(0, TIDY),),
            (0,),
        ),
    ]


def evicting() -> list[Scenario]:
    """Local copies go, while others read them or lose power."""
    return [
        build_scenario(
            "evict-cut",
            (sealed(FIVE, SIX), delivered(FIVE, SIX)),
            (flush(0, Duty(tidies_local=True)),),
            (0,),
        ),
        build_scenario(
            "evict",
            (sealed(FIVE, SIX), committed(FIVE), delivered(SIX)),
            (flush(0, Duty(tidies_local=True)), restore()),
            (0, 1),
        ),
    ]


def collecting() -> list[Scenario]:
    """Superseded attempts are collected beside whoever still copies or saves."""
    return [
        build_scenario(
            "young",
            (committed(FOUR), sealed(FIVE), delivered(FIVE, ranks=(1,))),
            (flush(0, TIDY), flush(0)),
            (0, 0),
            faults=_KILLS,
        ),
        build_scenario(
            "dead",
            (sealed(FIVE, SIX), delivered(FIVE, ranks=(1,)), committed(SIX)),
            (copy_late(FIVE, 0), flush(0, TIDY)),
            (0, 0),
        ),
        build_scenario(
            "dead-slow",
            (sealed(FIVE, SIX), delivered(FIVE, ranks=(1,)), committed(SIX)),
            (copy_late(FIVE, 0), flush(0, EMPTY)),
            (0, 0),
            faults=_KILLS,
        ),
        build_scenario(
            "rollback",
            (committed(FIVE, SIX), sealed(FIVE_AGAIN), delivered(FIVE_AGAIN, ranks=(1,))),
            (flush(0), flush(1, TIDY)),
            (0, 1),
        ),
    ]


def pinning() -> list[Scenario]:
    """A person pins a step that retention moves, or empties, at that moment."""
    return [
        build_scenario(
            "pins", (committed(FOUR, SIX), sealed(SIX)), (pin(FOUR), flush(0, TIDY)), (1, 0)
        ),
        build_scenario(
            "pins-empty",
            (committed(FOUR, SIX), trashed(FOUR)),
            (pin(FOUR), flush(0, EMPTY)),
            (1, 0),
        ),
        build_scenario(
            "pins-empty-twice",
            (committed(FOUR, SIX), trashed(FOUR)),
            (in_turn(pin(FOUR), flush(1, EMPTY), pin(FOUR)), flush(0, EMPTY)),
            (1, 0),
        ),
    ]


def restoring() -> list[Scenario]:
    """A job that restores beside everything that moves its steps."""
    return [
        build_scenario(
            "reader",
            (committed(FOUR), sealed(SIX), delivered(SIX)),
            (flush(0, replace(TIDY, commits=True)), restore(SWAPPED)),
            (0, 1),
        ),
        build_scenario(
            "restore-races",
            (committed(FOUR), sealed(FIVE), delivered(FIVE)),
            (restore(SWAPPED), commit(FIVE)),
            (0, 1),
        ),
        build_scenario(
            "mixed",
            (committed(FOUR), sealed(FIVE, ranks=(1,)), sealed(FIVE_AGAIN, ranks=(0,))),
            (restore(), flush(0)),
            (0, 0),
        ),
        _undo("undo", ()),
        _undo("undo-trash", (flush(0, TIDY),)),
        build_scenario(
            "way-back",
            (committed(FOUR, SIX), flush(0, TIDY), roll_back(FOUR)),
            (flush(0, TIDY), restore(SWAPPED)),
            (0, 1),
        ),
    ]


def _undo(name: str, more: tuple[Actor, ...]) -> Scenario:
    """A person restores step 4 by name while 6 is durable; a second, unnamed restore follows."""
    made = build_scenario(
        name,
        (committed(FOUR, SIX), *more),
        (restore(Job(nodes=(1, 0), step=4)), flush(0, TIDY)),
        (1, 0),
    )
    return replace(made, recover=in_turn(made.recover, restore(SWAPPED)))


def damaged() -> list[Scenario]:
    """A file of a committed step is bad; what is still sealed somewhere mends it."""
    files = {
        "weights": "weights-0.distcp",
        "metadata": METADATA,
        "receipt": seal_file(0),
        "manifest": MANIFEST,
        "commit": COMMIT,
    }
    made = [_damaged(f"flip-{word}", name) for word, name in files.items()]
    made.append(_damaged("flip-half", "weights-0.distcp", ranks=(0,)))
    bad = damage(FIVE, announced_file(0))
    untold = build_scenario(
        "flip-announced",
        (sealed(FIVE), delivered(FIVE, ranks=(1,)), announced(FIVE, 0), bad),
        (flush(0),),
        (0,),
    )
    plain = build_scenario(
        "flip-plain-metadata",
        (sealed(FIVE), delivered(FIVE), damage(FIVE, METADATA_REMOTE)),
        (flush(0),),
        (0,),
    )
    any_file = build_scenario(
        "flip",
        (committed(FOUR), sealed(FIVE, ranks=(0,)), committed(FIVE)),
        (restore(SWAPPED), flush(0)),
        (1, 0),
        duty=PLAIN,
        faults=frozenset({Fault.FLIP}),
    )
    return [*made, untold, plain, replace(any_file, recover=_mending(PLAIN))]


def _damaged(name: str, file: str, ranks: tuple[int, ...] = (0, 1)) -> Scenario:
    made = build_scenario(
        name,
        (committed(FOUR), sealed(FIVE, ranks=ranks), committed(FIVE), damage(FIVE, file)),
        (restore(SWAPPED), flush(0)),
        (1, 0),
        faults=_KILLS,
    )
    return replace(made, recover=_mending(ALL))


def _mending(duty: Duty) -> Actor:
    """Somebody reads, and whoever holds the shard copies it again."""
    return in_turn(restore(SWAPPED), recover(duty))


def replacing() -> list[Scenario]:
    """The run is made anew under its name while flushers of the old one are at work."""
    made = build_scenario(
        "recreate",
        (sealed(FIVE), delivered(FIVE, ranks=(1,))),
        (flush(0), make_anew(NEXT_RUN_ID, NEXT_THREE)),
        (0, None),
        faults=_KILLS,
    )
    return [replace(made, recover=recover(ALL, run_id=NEXT_RUN_ID))]


def scenarios() -> list[Scenario]:
    """All of them."""
    return [
        *saving(),
        *flushing(),
        *tidying(),
        *evicting(),
        *collecting(),
        *pinning(),
        *restoring(),
        *damaged(),
        *replacing(),
    ]
