"""How long the decision takes which step a large run restores.

1,000 ranks on 125 nodes, 100 steps on both tiers, 200 earlier restores: the newest steps lack a
node or a commit, so that most of the work is done for steps that are then refused. Pure: no file
is read. Prints the figures and, with `--write`, leaves them in `benchmarks/results/`.
"""

import argparse
import json
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import Attempt, step_folder
from tidegate_contract.restore_point import Copy, World, decide_restore_point

NODES, RANKS_PER_NODE, STEPS, RESTORES = 125, 8, 100, 200
RANKS = NODES * RANKS_PER_NODE
BUDGET_SECONDS = 2.0
REPEATS = 7


def a_world() -> World:
    """Every fifth step is durable, each other one is missing on one node."""
    nodes = tuple(
        frozenset(range(first, first + RANKS_PER_NODE)) for first in range(0, RANKS, RANKS_PER_NODE)
    )
    attempts = [Attempt(step=10 * step, nonce=f"{step:016x}") for step in range(1, STEPS + 1)]
    everyone = frozenset(range(RANKS))
    return World(
        nodes=nodes,
        local=tuple(
            tuple(
                _copy(attempt, ranks)
                for index, attempt in enumerate(attempts)
                if index % NODES != node
            )
            for node, ranks in enumerate(nodes)
        ),
        remote=tuple(
            _copy(attempt, everyone, is_committed=index % 5 == 0)
            for index, attempt in enumerate(attempts)
        ),
        claims=tuple(
            LineageClaim(
                run_id="r",
                number=number,
                restored=attempts[number % STEPS],
                claimed_at=datetime.fromtimestamp(number, UTC),
            )
            for number in range(2, RESTORES + 2)
        ),
        max_tries=3,
    )


def _copy(attempt: Attempt, ranks: frozenset[int], *, is_committed: bool = False) -> Copy:
    return Copy(
        attempt=attempt,
        lineage=1 + attempt.step // 100,
        tokens=attempt.step * 1_000_000,
        world_size=RANKS,
        ranks=ranks,
        is_committed=is_committed,
        is_announced=is_committed,
        folder=step_folder(attempt),
    )


def measure() -> dict[str, object]:
    """Seconds of one decision; the world is made anew for each."""
    seconds = []
    for _ in range(REPEATS):
        world = a_world()
        begun = time.perf_counter()
        point = decide_restore_point(world)
        seconds.append(time.perf_counter() - begun)
        assert len(point.candidates) + len(point.refused) == STEPS
        assert {len(candidate.sources) for candidate in point.candidates} == {RANKS}
    return {
        "ranks": RANKS,
        "nodes": NODES,
        "steps": STEPS,
        "restores": RESTORES,
        "best_seconds": round(min(seconds), 4),
        "median_seconds": round(statistics.median(seconds), 4),
        "worst_seconds": round(max(seconds), 4),
        "budget_seconds": BUDGET_SECONDS,
    }


def main() -> None:
    """Measures, prints, fails beyond the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="leave the result in benchmarks/results"
    )
    arguments = parser.parse_args()
    found = measure()
    now = datetime.now(UTC)
    machine = {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }
    text = json.dumps({"at": now.isoformat(timespec="seconds"), **found, "machine": machine})
    print(text)
    if arguments.write:
        folder = Path(__file__).parent / "results"
        (folder / f"{now:%Y-%m-%d}-restore-point.json").write_text(text + "\n")
    if float(str(found["best_seconds"])) > BUDGET_SECONDS:
        raise SystemExit(f"over the budget of {BUDGET_SECONDS:.0f} s")


if __name__ == "__main__":
    main()
