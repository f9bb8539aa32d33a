"""Which nodes of a run copy now: a window over the ranks, seen on the remote tier alone. Pure.

Nodes send each other nothing: every flusher announces its ranks at once and looks whose receipts
are still missing. A wrong turn costs bandwidth, never correctness.
"""

from collections.abc import Set

AUTOMATIC_NODES = 16
"""Nodes at once when the policy leaves it open: enough to fill a file system, not to storm it."""
PATIENCE_SECONDS = 60.0
"""A node that announced and then stopped delivering holds the others up for at most this long."""


def may_copy(
    mine: Set[int],
    announced: Set[int],
    received: Set[int],
    *,
    nodes_at_once: int,
    waited_seconds: float,
) -> bool:
    """Whether the node with the ranks `mine` copies now.

    The window moves in the order of ranks: a node waits while as many nodes of lower ranks as the
    window holds have announced and not delivered. Nodes are taken to hold equally many ranks.

    Args:
        mine: this node's ranks in the attempt; not empty.
        announced: ranks whose files will come.
        received: ranks whose receipts are there.
        nodes_at_once: width of the window; 0 means automatic.
        waited_seconds: since the last receipt of a lower rank came in.
    """
    window = nodes_at_once or AUTOMATIC_NODES
    size = len(mine)
    busy = {rank // size for rank in announced - received if rank < min(mine)}
    return len(busy) < window or waited_seconds >= PATIENCE_SECONDS
