"""A step that a person names for a restore: one value on all ranks, and what is said of it.

Nothing here reads a tier. `restore` asks on all ranks; `weights` asks for the sentence alone.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from tidegate.ranks import Ranks
from tidegate_contract.errors import Reject
from tidegate_contract.layout import Attempt
from tidegate_contract.restore_point import World, decide_restore_point

_TOLD = 5
"""Steps or reasons in one sentence."""
_SHOWN_CHARACTERS = 60


def check_step(step: object) -> int | None:
    """The step that a person named; None means the newest one. Pure.

    Raises:
        Reject: it is no step's number.
    """
    if step is None:
        return None
    if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**63:
        return step
    raise Reject(f"step is {_show(step)}; allowed is None, or an int from 0 on")


def agree_step(ranks: Ranks, step: int | None) -> int | None:
    """The step that every rank names, or None. Collective.

    Raises:
        Reject: on all ranks alike: it is no step's number, or a rank names another one.
    """
    told: dict[str, int] = {}
    for rank, shown in enumerate(ranks.gather(_show(step))):
        told.setdefault(shown, rank)
    if len(told) > 1:
        named = ", ".join(
            f"rank {rank} names {shown}" for shown, rank in list(told.items())[:_TOLD]
        )
        raise Reject(f"restore: step must be the same on all ranks; {named}")
    return check_step(step)


def explain_named(reasons: Collection[str], step: int) -> str:
    """Why a step that was named is restored from the save that was chosen. Pure.

    Args:
        reasons: why other saves of the same step were not taken, which may be newer ones.
        step: its number.
    """
    others = f" (another save of it: {'; '.join(reasons)})" if reasons else ""
    return f"step {step} was asked for{others}"


def explain_missing(world: World, reasons: Mapping[Attempt, str]) -> str:
    """Why the named step of a world cannot be had, and which steps can. Pure.

    Args:
        world: with the step that was named.
        reasons: attempt → why it is not taken; those of other steps are left out.
    """
    whys = [why for attempt, why in reasons.items() if attempt.step == world.step]
    told = f"cannot be read ({'; '.join(whys[:_TOLD])})" if whys else "is not there"
    others = decide_restore_point(replace(world, step=None, max_tries=None)).candidates
    steps = list(dict.fromkeys(c.attempt.step for c in others if c.attempt.step != world.step))
    more = ", …" if len(steps) > _TOLD else ""
    newest = ", ".join(map(str, steps[:_TOLD]))
    left = f"newest others: {newest}{more}" if steps else "there is no other one"
    return f"step {world.step} {told}; {left}"


def _show(value: object) -> str:
    return repr(value)[:_SHOWN_CHARACTERS]
