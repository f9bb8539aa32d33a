"""How often a step was restored and did not come back to training. Pure.

Owns what counts as a failed try; `restore_point` sets a step aside by it and the trainer writes the
count into its claim.
"""

from collections.abc import Collection, Iterable

from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import Attempt


def count_failed_tries(
    claims: Iterable[LineageClaim], came_back: Collection[int], running: Collection[int] = ()
) -> dict[Attempt, int]:
    """Attempt → its failed tries in a row; attempts that never failed may be missing.

    A claim that came back to training ends the row of its own attempt only: that another step
    could be restored since says nothing about this one. An attempt that a person named is not
    counted at all from then on: set aside, it would let the next restore undo the rollback.

    Args:
        claims: of the run, in any order.
        came_back: lineages known to have trained: by their word, or because a save tells them.
        running: lineages of restores that have not ended.
    """
    counts: dict[Attempt, int] = {}
    named: set[Attempt] = set()
    for claim in sorted(claims, key=lambda claim: claim.number):
        attempt = claim.restored
        if attempt is None or attempt in named or claim.number in running:
            continue
        if claim.explicit:
            named.add(attempt)
        is_over = claim.explicit or claim.number in came_back
        counts[attempt] = 0 if is_over else counts.get(attempt, 0) + 1
    return counts
