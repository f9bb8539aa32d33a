"""Decides which schedules branch off a run, and leaves out those that could show nothing new.

Two calls whose footprints do not meet may change places. Left out, without loss:

- a switch before a call that concerns nobody else, such as a dup: it equals the switch after it;
- a switch back to an actor whose call in flight has met nothing meanwhile: it equals a switch after
  that call;
- a switch before a call that only reads, if nothing met it until its actor went on: the other
  actor's part is that of the next switch. Such switches are held back until the run of the next one
  has shown what it touches;
- a late call, a death or a power cut between two calls that do not meet it;
- the death of an actor that holds no lock: it equals a switch from which nobody comes back.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tidegate_crash.cuts import Cut, enumerate_cuts, machines_at_risk
from tidegate_crash.disk import Disk
from tidegate_crash.effects import flock, fsync, is_private, is_read
from tidegate_crash.nodes import BYTES, File, Footprint
from tidegate_crash.process import Call
from tidegate_crash.scenario import Fault
from tidegate_crash.schedule import Event, Run, Schedule, Turn, footprint_of

_ENDS = (Event.DIE, Event.CUT)


@dataclass(frozen=True, slots=True)
class Held:
    """A switch held back: so many boundaries `earlier`, before a call that reads this."""

    earlier: int
    reads: Footprint


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, and the switches that wait for what its last switch leads to."""

    schedule: Schedule
    held: tuple[Held, ...] = ()


class Branches:
    """Follows one run after the other; plans what comes next.

    Attributes:
        longer: plans with one event more than the run.
        equal: plans with as many events: switches that were held back in vain.
    """

    def __init__(self, faults: frozenset[Fault]) -> None:
        """Knows which events there may be."""
        self.longer: list[Plan] = []
        self.equal: list[Plan] = []
        self._faults = faults
        self.begin(Plan(()))

    def begin(self, plan: Plan) -> None:
        """The next run."""
        self._schedule = plan.schedule
        self._held = plan.held
        switches = [turn.actor for turn in plan.schedule if turn.event is Event.SWITCH]
        self._partner = switches[-1] if switches else None
        self._reader: int | None = None
        self._reads: list[tuple[int, int, Footprint]] = []

    def leave(self, run: Run, current: int | None, *, is_known: bool) -> None:
        """At each boundary: switches that cannot be held back any longer are planned.

        Args:
            run: at the boundary.
            current: whose turn it is; None at the end.
            is_known: what follows was seen before, so this run ends here.
        """
        if self._held and (is_known or current != self._partner):
            met_all = current == self._partner
            for held in self._held:
                if met_all or held.reads.conflicts(run.part):
                    self.equal.append(Plan(_earlier(self._schedule, held.earlier)))
            self._held = ()
        if self._reads and (is_known or current != self._reader):
            for at, other, _ in self._reads:
                self.longer.append(self._plus(Turn(at, Event.SWITCH, other)))
            self._reads = []

    def branch(self, run: Run, current: int) -> None:
        """At a boundary never seen before: plans all schedules with one more event here."""
        at = run.boundary - 1
        self._reader = current
        process = run.cast[current].process
        call = process.pending
        if call is None:
            return
        if Fault.EIO in self._faults and call.effect is fsync:
            self.longer.append(self._plus(Turn(at, Event.FAIL, current), self._held))
        if run.has_just_switched or is_private(process, call):
            return
        for event, actor, cut in self._ends(run, current, call):
            self._plan_end(Turn(at, event, actor, cut), current)
        for other in run.alive():
            if other != current and run.may_resume(other):
                self._plan_switch(run, current, call, other)

    def _plan_switch(self, run: Run, current: int, call: Call, other: int) -> None:
        at = run.boundary - 1
        if is_read(call):
            footprint = footprint_of(run.disk, run.cast[current].process, call)
            self._reads.append((at, other, footprint))
            return
        held = tuple(Held(at - n, reads) for n, actor, reads in self._reads if actor == other)
        self._reads = [read for read in self._reads if read[1] != other]
        self.longer.append(self._plus(Turn(at, Event.SWITCH, other), held))

    def _plan_end(self, turn: Turn, current: int) -> None:
        schedule = self._plus(turn).schedule
        self.longer.append(Plan(schedule))
        if turn.event in _ENDS and turn.actor == current == self._partner:
            for held in self._held:  # the one who waits goes on at once
                self.longer.append(Plan(_earlier(schedule, held.earlier)))

    def _plus(self, turn: Turn, held: tuple[Held, ...] = ()) -> Plan:
        return Plan((*self._schedule, turn), held)

    def _ends(self, run: Run, current: int, call: Call) -> Iterator[tuple[Event, int, Cut | None]]:
        """Late calls, and ends of one actor that the other survives."""
        if Fault.LATE in self._faults:
            for number, _, _ in run.late_calls():
                if number in run.just_met:
                    yield Event.ARRIVE, number, None
        if len(run.alive()) < 2:
            return
        if Fault.KILL in self._faults:
            yield from _deaths(run, current, call)
        if Fault.CUT in self._faults:
            yield from _cuts(run, current, call)


def _deaths(run: Run, current: int, call: Call) -> Iterator[tuple[Event, int, Cut | None]]:
    """Of holders of a lock, which somebody else may take then."""
    for number in run.alive():
        is_due = not is_read(call) if number == current else call.effect is flock
        if is_due and run.cast[number].process.holds_lock:
            yield Event.DIE, number, None


def _cuts(run: Run, current: int, call: Call) -> Iterator[tuple[Event, int, Cut | None]]:
    """Power cuts that one actor survives: all or all bytes are lost."""
    machines = {number: run.cast[number].process.machine for number in run.alive()}
    if len(set(machines.values())) < 2:
        return
    at_risk = machines_at_risk(run.disk)
    for number, machine in machines.items():
        if machine not in at_risk:
            continue
        if number == current:
            is_due = not is_read(call)
        else:
            next_ = footprint_of(run.disk, run.cast[current].process, call)
            is_due = next_.conflicts(_at_risk(run.disk, machine))
        if is_due:
            for cut in list(enumerate_cuts(run.disk, [machine], 0, 0))[1:3]:
                yield Event.CUT, number, cut


def _at_risk(disk: Disk, machine: str) -> Footprint:
    """What a power cut of a machine may change."""
    found = Footprint()
    for change in disk.changes:
        if change.machine == machine:
            found.writes |= {slot for slot in (change.source, change.target) if slot is not None}
    for inode, node in disk.nodes.items():
        if isinstance(node, File) and node.writer == machine:
            found.writes.add((inode, BYTES))
    return found


def _earlier(schedule: Schedule, boundaries: int) -> Schedule:
    """The same with the last switch, and what follows it, so many boundaries earlier."""
    last = max(n for n, turn in enumerate(schedule) if turn.event is Event.SWITCH)
    return tuple(
        Turn(turn.at - boundaries, turn.event, turn.actor, turn.cut) if n >= last else turn
        for n, turn in enumerate(schedule)
    )
