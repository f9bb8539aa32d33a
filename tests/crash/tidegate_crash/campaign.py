"""Explores all scenarios, each with its share of the effort, in a few processes beside each other.

Called by the tests; a scenario is found by its name, as actors do not pass between processes.
"""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from unittest import mock

from tidegate_crash.explore import explore
from tidegate_crash.judge import Counts
from tidegate_crash.pairs import pairs
from tidegate_crash.scenarios import scenarios


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How far one scenario is explored.

    Attributes:
        scenario: its name.
        depth: most events in a schedule.
        mixes: random outcomes of each power cut, besides the systematic ones.
        most: schedules.
    """

    scenario: str
    depth: int = 1
    mixes: int = 2
    most: int = 1 << 30


def explore_one(effort: Effort) -> Counts:
    """Explores one scenario."""
    scenario = next(found for found in [*scenarios(), *pairs()] if found.name == effort.scenario)
    return explore(scenario, depth=effort.depth, mixes=effort.mixes, most=effort.most)


def explore_all(efforts: Iterable[Effort], workers: int) -> Iterator[Counts]:
    """Explores scenarios in processes of their own; yields in the order of `efforts`."""
    start = multiprocessing.get_context("spawn")
    same_hashes = mock.patch.dict(os.environ, PYTHONHASHSEED="0")  # so that ids can be compared
    with same_hashes, ProcessPoolExecutor(workers, mp_context=start) as pool:
        try:
            yield from pool.map(explore_one, efforts)
        finally:
            pool.shutdown(cancel_futures=True)  # the caller may have seen enough


def totals(found: Iterable[Counts]) -> dict[str, int]:
    """The sums of all counts, by their names; a state that several scenarios met is one."""
    names = [item.name for item in fields(Counts) if item.type in (int, "int")]
    explored = list(found)
    sums = {name: sum(getattr(counts, name) for counts in explored) for name in names}
    return sums | {"states": len(set().union(*(counts.ids for counts in explored)))}


def as_record(counts: Counts) -> dict[str, object]:
    """The counts of one scenario, to be written down."""
    return {item.name: getattr(counts, item.name) for item in fields(counts) if item.name != "ids"}


def in_words(counts: Counts) -> str:
    """One line for people."""
    return (
        f"{counts.scenario:20s} {counts.states:7,} states {counts.schedules:7,} schedules "
        f"{counts.kills:9,} kills {counts.cuts:8,} cuts {counts.late:7,} late calls"
    )
