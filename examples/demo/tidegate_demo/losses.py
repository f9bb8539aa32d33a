"""Compares what two runs printed. Pure."""

from collections.abc import Iterable
from typing import Any


def losses_by_step(lines: Iterable[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """(rank, step) → loss, to the last bit as it was printed."""
    return {(line["rank"], line["step"]): line["loss"] for line in lines if "loss" in line}


def find_difference(
    got: dict[tuple[int, int], float], want: dict[tuple[int, int], float]
) -> str | None:
    """A sentence on the first loss of `got` that is not exactly that of `want`; None if all are."""
    for rank, step in sorted(got, key=lambda key: (key[1], key[0])):
        if (rank, step) not in want:
            return f"rank {rank}, step {step}: the uninterrupted run has no such step"
        if got[rank, step] != want[rank, step]:
            return (
                f"rank {rank}, step {step}: loss {got[rank, step]!r}, "
                f"uninterrupted {want[rank, step]!r}"
            )
    return None


def has_fallen(losses: dict[tuple[int, int], float], window: int = 20) -> bool:
    """Whether the mean of the last `window` steps is three quarters of the first loss at most."""
    steps = sorted({step for _, step in losses})
    last = [value for (_, step), value in losses.items() if step in steps[-window:]]
    first = [value for (_, step), value in losses.items() if step == steps[0]]
    return sum(last) / len(last) < 0.75 * sum(first) / len(first)
