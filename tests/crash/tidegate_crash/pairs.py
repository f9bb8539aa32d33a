"""Any two processes of the stage beside each other, in one busy world.

The scenarios of `scenarios` each show one danger; here nobody chose who meets whom.
"""

from dataclasses import replace
from itertools import combinations_with_replacement

from tidegate_crash.actors import (
    EMPTY,
    TIDY,
    announced,
    commit_if_there,
    committed,
    copy_late,
    delivered,
    in_turn,
    pin,
    roll_back,
    sealed,
)
from tidegate_crash.flusher import Duty, flush
from tidegate_crash.restoring import Job, restore
from tidegate_crash.scenario import Actor, Scenario
from tidegate_crash.scenarios import ALL, SWAPPED, build_scenario
from tidegate_crash.stage import FIVE, FIVE_AGAIN, FOUR, SIX

_LEAD = replace(ALL, empties=False)
_ONE_NODE = Job(nodes=(0, 0))

WORLDS: dict[str, Actor] = {
    "going on": in_turn(
        committed(FOUR),
        sealed(FIVE, SIX),
        delivered(FIVE),
        delivered(SIX, ranks=(1,)),
    ),
    "rolled back": in_turn(
        committed(FOUR, FIVE),
        sealed(SIX),
        delivered(SIX, ranks=(1,)),
        roll_back(FOUR),
        sealed(FIVE_AGAIN),
        delivered(FIVE_AGAIN, ranks=(0,)),
    ),
    "first save": in_turn(sealed(FIVE, SIX), delivered(FIVE, ranks=(0,))),
    "full trash": in_turn(
        committed(FOUR, FIVE),
        sealed(FIVE, SIX),
        flush(0, TIDY),
        delivered(SIX, ranks=(0,)),
        announced(SIX, 1),
    ),
}
"""Both nodes hold sealed steps, of which the remote tier has some wholly and some by half."""

ACTORS: dict[str, tuple[Actor, int]] = {
    "flusher 0": (flush(0), 0),
    "flusher 1": (flush(1), 1),
    "lead": (flush(0, _LEAD), 0),
    "tidy": (flush(0, TIDY), 0),
    "empty": (flush(0, EMPTY), 0),
    "evict": (flush(1, Duty(copies=False, commits=False, tidies_local=True)), 1),
    "late copy": (copy_late(SIX, 0), 0),
    "committer": (commit_if_there(FIVE, SIX), 1),
    "restore": (restore(), 0),
    "restore elsewhere": (restore(SWAPPED), 1),
    "restore on one node": (restore(_ONE_NODE), 0),
    "roll back": (restore(Job(nodes=(1, 0), step=4)), 1),
    "pin": (pin(FOUR), 1),
}
"""name → the process, and the node that it runs on."""


def pairs() -> list[Scenario]:
    """All of them, in all worlds; both orders are the explorer's."""
    return [
        build_scenario(
            f"{world}: {one}, {other}",
            (prepare,),
            (ACTORS[one][0], ACTORS[other][0]),
            (ACTORS[one][1], ACTORS[other][1]),
        )
        for world, prepare in WORLDS.items()
        for one, other in combinations_with_replacement(ACTORS, 2)
    ]
