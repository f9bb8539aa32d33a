"""Explores a scenario: every schedule of its actors with a bounded number of events.

    counts = explore(scenario, depth=2)
    assert not counts.violations, counts.violations[0]

Work of the engine, in this order: `install` puts simulated calls into production; `schedule` runs
actors on a `disk`, call by call; at each boundary between two calls `judge` judges what would be
left if everything ended there; this module decides which schedules are run.

An event is a switch to the other actor before a call (a preemption), the death of an actor while
the other goes on, the late arrival of a call that was in flight, a failed fsync, or a power cut of
one machine that the other survives. Schedules have at most `depth` of them, and each may end at
every boundary, which costs no event: there the state itself, all power cuts, lost disks and flipped
bits are judged, and, as one more event, the late arrival of a call during the second run. The bound
keeps what is known to find faults (two preemptions and a death) and leaves out, at depth 2, a third
preemption.

Runs are repeated from the start for each schedule. A boundary at which everything that decides the
future (disk with what is not durable, results that each actor has seen, locks) was met before with
as many events left is not explored again. That is exact but for the collision of two 64-bit hashes.
Nothing depends on real time, on threads or on hash seeds: the same scenario gives the same counts.

What is left out because it equals another schedule stands in `branches`.
"""

import gc
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tidegate_crash.branches import Branches, Plan
from tidegate_crash.disk import Disk
from tidegate_crash.install import installed
from tidegate_crash.judge import Bounds, Counts, Judge
from tidegate_crash.process import Process, World
from tidegate_crash.scenario import SIMULATED, Fault, History, Scenario
from tidegate_crash.schedule import Event, Role, Run, Thread, Turn

MOUNTS = ("remote", "node0", "node1")
_START_NS = 1_800_000_000 * 10**9
_ACTORS_AFTER_NS = 86_400 * 10**9
_PREPARE_NUMBER = 7
_DEFAULT = Bounds()


def explore(
    scenario: Scenario,
    *,
    depth: int,
    most: int = 1 << 30,
    mixes: int = _DEFAULT.mixes,
    arrivals: int = _DEFAULT.arrivals,
) -> Counts:
    """Explores a scenario and stops at the first violation.

    Args:
        scenario: what to explore; its paths are those of `SIMULATED`.
        depth: most events in a schedule; 0 runs each actor once, in both orders.
        most: schedules; the shortest come first, and of the longest ones a sample.
        mixes: random outcomes of each power cut, besides the systematic ones.
        arrivals: moments of the second run, of those that make a difference, at which each late
            call arrives; the first and the last are among them.
    """
    with installed() as world, _rare_collection():
        bounds = Bounds(mixes=mixes, arrivals=arrivals)
        return _Exploration(world, scenario, depth, bounds).run(most)


@contextmanager
def _rare_collection() -> Iterator[None]:
    """All that an exploration keeps is alive: looking for garbage among it takes a tenth of it."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Exploration:
    def __init__(self, world: World, scenario: Scenario, depth: int, bounds: Bounds) -> None:
        self._world = world
        self._scenario = scenario
        self._depth = depth
        self._judge = Judge(world, scenario, SIMULATED, bounds)
        self._history = History()
        self._disk = self._prepare()
        self._roles = _roles(scenario)
        self._seen: set[int] = set()
        self._branches = Branches(scenario.faults)
        self._left = depth

    def _prepare(self) -> Disk:
        disk = Disk(MOUNTS)
        disk.now = _START_NS
        process = Process("prepare", "prepare", _PREPARE_NUMBER, disk)
        self._world.run(process, lambda: self._scenario.prepare(SIMULATED, self._history))
        disk.sync_all()
        disk.now += _ACTORS_AFTER_NS
        return disk

    def run(self, most: int) -> Counts:
        counts = self._judge.counts
        threads = [Thread() for _ in self._roles[1:]]
        plans = [Plan(())]
        if threads:
            plans.append(Plan((Turn(0, Event.SWITCH, 1),)))  # who begins is no event
        try:
            for left in range(self._depth, -1, -1):
                self._left = left
                queue = deque(_sample(plans, most - counts.schedules))
                while queue and not counts.violations and counts.schedules < most:
                    self._execute(queue.popleft(), threads)
                    queue.extend(self._branches.equal)
                    self._branches.equal = []
                plans, self._branches.longer = self._branches.longer, []
        finally:
            for thread in threads:
                thread.do(None)
        return counts

    def _execute(self, plan: Plan, threads: Sequence[Thread]) -> None:
        self._count(plan)
        self._branches.begin(plan)
        fresh = plan.schedule[-1].at + 1 if plan.schedule else 0
        run = Run(self._world, self._disk.clone(), SIMULATED, self._history.copy(), self._roles)
        run.execute(plan.schedule, fresh, self._observe, threads)
        for defect in run.defects:
            self._blame(run, defect)

    def _count(self, plan: Plan) -> None:
        counts = self._judge.counts
        counts.schedules += 1
        events = {turn.event for turn in plan.schedule}
        counts.late += Event.ARRIVE in events
        counts.failed_fsyncs += Event.FAIL in events
        counts.cuts += Event.CUT in events

    def _observe(self, run: Run, current: int | None) -> bool:
        """At a boundary: judges what would be left, and notes the schedules that branch off."""
        key = run.key(-1 if current is None else current)
        is_known = key in self._seen
        self._branches.leave(run, current, is_known=is_known)
        if is_known:
            return False
        self._seen.add(key)
        found = next(self._violations(run), None)
        if found is not None:
            self._blame(run, found)
            return False
        if self._left > 0 and current is not None:
            self._branches.branch(run, current)
        return True

    def _violations(self, run: Run) -> Iterator[str]:
        yield from self._judge.crash(run.disk, run.history)
        if self._left > 0 and Fault.LATE in self._scenario.faults:
            for _, process, call in run.late_calls():
                yield from self._judge.late(run.disk, run.history, process, call)

    def _blame(self, run: Run, sentence: str) -> None:
        lines = (f"  {line}" for line in run.told())
        text = "\n".join([f"{self._scenario.name}: {sentence}", *lines])
        self._judge.counts.violations.append(text)


def _sample(plans: list[Plan], most: int) -> list[Plan]:
    return plans if len(plans) <= most else random.Random(len(plans)).sample(plans, most)


def _roles(scenario: Scenario) -> list[Role]:
    roles = []
    for number, (actor, node) in enumerate(zip(scenario.actors, scenario.nodes, strict=True)):
        machine = f"machine {number}" if node is None else f"node {node}"
        roles.append(Role(actor, f"actor {number} on {machine}", machine))
    return roles
