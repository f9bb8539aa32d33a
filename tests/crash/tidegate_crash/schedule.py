"""Runs one schedule: actors as processes of one world, one call at a time.

The first actor runs on the caller's stack, the others on threads of their own that wait for a
baton, so that a schedule without a switch costs no switch of threads. Before each call of an actor
there is a boundary, numbered from 0; a schedule says what happens at which. Everything else
follows: an actor runs until it ends, then the next one does. The same schedule always gives the
same run.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tidegate_crash.cuts import Cut, apply_cut
from tidegate_crash.disk import Disk
from tidegate_crash.effects import is_visible
from tidegate_crash.nodes import Footprint
from tidegate_crash.process import Call, Killed, Process, World
from tidegate_crash.scenario import Actor, History, Place


class Event(StrEnum):
    """What a schedule lets happen at a boundary."""

    SWITCH = "switch to"
    DIE = "kill"
    ARRIVE = "late call of"
    FAIL = "failed fsync of"
    CUT = "power cut of"


@dataclass(frozen=True, slots=True)
class Turn:
    """An event at a boundary; `cut` says what is left where power is lost."""

    at: int
    event: Event
    actor: int
    cut: Cut | None = None


Schedule = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Role:
    """An actor and where it runs."""

    actor: Actor
    name: str
    machine: str


class Thread:
    """A thread that runs one job after the other."""

    def __init__(self) -> None:
        """Starts it; it waits for its first job."""
        self._job: Callable[[], None] | None = None
        self._start = threading.Lock()
        self._start.acquire()
        threading.Thread(target=self._work, daemon=True).start()

    def do(self, job: Callable[[], None] | None) -> None:
        """Starts a job; None ends the thread."""
        self._job = job
        self._start.release()

    def _work(self) -> None:
        while True:
            self._start.acquire()
            job = self._job
            if job is None:
                return
            job()


class _Cast:
    """One actor of a run."""

    __slots__ = ("baton", "ghost", "has_ended", "has_started", "process", "role")

    def __init__(self, role: Role, process: Process) -> None:
        self.role = role
        self.process = process
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ghost: tuple[Process, Call] | None = None
        self.has_started = False
        self.has_ended = False


Observer = Callable[["Run", int | None], bool]
"""Sees a run at a boundary before the call of an actor (None: all have ended); False stops it."""


class Run:
    """One run of a schedule.

    Attributes:
        disk: as it is now.
        history: of all actors.
        log: actor and call, in their order; calls at which something happened included.
        boundary: of the next call.
        has_just_switched: the last event was a switch, and no call was made since.
        waiting: actor → what its call in flight would read and change.
        part: what was read and changed since the last switch of the schedule.
        met: of these, whose call has had a conflict since it waits; `just_met`: with the last call.
        defects: sentences on actors that ended in a way that production may not.
    """

    def __init__(
        self, world: World, disk: Disk, place: Place, history: History, roles: Sequence[Role]
    ) -> None:
        """Nothing has run yet; the disk is the run's from here on."""
        self._world = world
        self._place = place
        self.disk = disk
        self.history = history
        self.log: list[tuple[str, Call | Turn]] = []
        self.defects: list[str] = []
        self.boundary = 0
        self.has_just_switched = False
        self.waiting: dict[int, Footprint] = {}
        self.met: set[int] = set()
        self.just_met: set[int] = set()
        self.part = Footprint()
        locks: dict[int, Any] = {}
        self.cast = [
            _Cast(role, Process(role.name, role.machine, number, disk, locks, self._gate))
            for number, role in enumerate(roles)
        ]
        self._locks = locks
        self._crash: BaseException | None = None
        self._is_stopped = False
        self._turns: dict[int, Turn] = {}
        self._fresh = self._last_wait = 0
        self._observe: Observer = lambda run, actor: True

    def execute(
        self, schedule: Schedule, fresh: int, observe: Observer, threads: Sequence[Thread]
    ) -> None:
        """Runs the schedule to its end.

        Args:
            schedule: what happens when.
            fresh: the first boundary that is observed.
            observe: sees each boundary from there on, and the end.
            threads: one for each actor but the first.
        """
        self._turns = {turn.at: turn for turn in schedule}
        self._fresh, self._observe, self._threads = fresh, observe, threads
        waits = [turn.at for turn in schedule if turn.event in (Event.SWITCH, Event.DIE)]
        self._last_wait = max(waits, default=0)
        main = self.cast[0]
        main.has_started = True
        self._act(main)
        while (following := self._next()) is not None:
            self._wake(following)
            main.baton.acquire()
        for other in self.cast[1:]:
            if other.has_started and not other.has_ended:
                self._wake(other)
                main.baton.acquire()
        if self._crash is not None:
            raise self._crash
        if not self._is_stopped:
            observe(self, None)

    # Threads.

    def _act(self, cast: _Cast) -> None:
        self._world.process = cast.process
        try:
            cast.role.actor(self._place, self.history)
        except (OSError, Killed):
            pass
        except Exception as error:  # noqa: BLE001  # what is no error of production is a defect
            if not type(error).__module__.startswith("tidegate"):
                self.defects.append(f"{cast.role.name} raised {error!r}")
        except BaseException as error:  # noqa: BLE001  # of a worker: raised again by the caller
            self._crash = error
            self._stop()
        cast.process.die()
        cast.has_ended = True

    def _work(self, cast: _Cast) -> None:
        self._act(cast)
        following = self._next()
        self._wake(self.cast[0] if following is None else following)

    def _next(self) -> _Cast | None:
        alive = (cast for cast in self.cast if not cast.has_ended and not cast.process.is_dead)
        return next(alive, None)

    def _wake(self, cast: _Cast) -> None:
        if cast.has_started:
            cast.baton.release()
            return
        cast.has_started = True
        number = self.cast.index(cast)
        self._threads[number - 1].do(lambda: self._work(cast))

    def _stop(self) -> None:
        self._is_stopped = True
        for cast in self.cast:
            cast.process.is_dead = True

    # Boundaries.

    def _gate(self, process: Process) -> None:
        cast = self.cast[process.number]
        self._note_meetings()
        while True:
            at, self.boundary = self.boundary, self.boundary + 1
            turn = self._turns.get(at)
            if turn is None:
                if at >= self._fresh and not self._observe(self, process.number):
                    self._stop()
                    raise Killed
                break
            self.log.append((process.name, turn))
            if turn.event is Event.FAIL:
                process.is_failing = True
                break
            self._apply(cast, turn)
            if process.is_dead:
                raise Killed
        self.has_just_switched = False
        if process.pending is not None:
            self.log.append((process.name, process.pending))

    def _apply(self, current: _Cast, turn: Turn) -> None:
        other = self.cast[turn.actor]
        match turn.event:
            case Event.SWITCH:
                self._switch(current, other)
            case Event.DIE:
                self._kill(other)
            case Event.ARRIVE:
                self._arrive(other)
            case Event.CUT:
                self._cut(turn)
            case Event.FAIL:
                current.process.is_failing = True

    def _switch(self, current: _Cast, other: _Cast) -> None:
        self.has_just_switched = True
        self._resume(other)
        self._pause(current.process, current.process.pending)
        self._wake(other)
        current.baton.acquire()
        self._world.process = current.process
        self._resume(current)

    def _pause(self, process: Process, call: Call | None) -> None:
        if call is not None and self.boundary > self._last_wait:
            self.waiting[process.number] = footprint_of(self.disk, process, call)
            self.disk.footprint = Footprint()

    def _resume(self, cast: _Cast) -> None:
        number = cast.process.number
        self.waiting.pop(number, None)
        self.met.discard(number)

    def _note_meetings(self) -> None:
        if not self.waiting:
            return
        done, self.disk.footprint = self.disk.footprint or Footprint(), Footprint()
        self.part.add(done)
        self.just_met = {n for n, call in self.waiting.items() if done.conflicts(call)}
        self.met |= self.just_met
        for number in self.just_met:
            process, pending = self._in_flight(number)
            self._pause(process, pending)

    def _in_flight(self, number: int) -> tuple[Process, Call | None]:
        cast = self.cast[number]
        return cast.ghost or (cast.process, cast.process.pending)

    def _kill(self, cast: _Cast) -> None:
        if cast.process.pending is not None:
            cast.ghost = cast.process.ghost(self.disk), cast.process.pending
            self._pause(*cast.ghost)
        cast.process.die()

    def _arrive(self, cast: _Cast) -> None:
        if not cast.process.is_dead:
            self._kill(cast)
        if cast.ghost is not None:
            ghost, call = cast.ghost
            cast.ghost = None
            self.waiting.pop(cast.process.number, None)
            make_late(ghost, call)

    def _cut(self, turn: Turn) -> None:
        assert turn.cut is not None
        self.disk = apply_cut(self.disk, turn.cut)
        for cast in self.cast:
            if cast.process.machine in turn.cut.machines:
                cast.process.die()
            cast.process.disk = self.disk

    # What an observer may ask.

    def alive(self) -> list[int]:
        """Actors that can go on."""
        return [
            number
            for number, cast in enumerate(self.cast)
            if not cast.has_ended and not cast.process.is_dead
        ]

    def may_resume(self, number: int) -> bool:
        """False where its call in flight might as well have come before it was made to wait."""
        is_at_start = self.cast[number].process.trail == 0  # that wait costs no event
        return is_at_start or number not in self.waiting or number in self.met

    def told(self) -> Iterator[str]:
        """The run so far, a line for each call and event."""
        for name, what in self.log:
            if isinstance(what, Turn):
                cut = f": {what.cut.words}" if what.cut else ""
                yield f"-- {what.event} {self.cast[what.actor].role.name}{cut}"
            else:
                yield f"{name}: {what.name}({', '.join(map(_in_words, what.args))})"

    def key(self, current: int) -> int:
        """Hash of all that decides how this run goes on."""
        locks = tuple(sorted((i, self._owner(file)) for i, file in self._locks.items()))
        actors = tuple(
            (cast.process.trail, cast.process.is_dead, cast.has_ended, cast.ghost is None)
            for cast in self.cast
        )
        return hash((self.disk.state(), locks, actors, current))

    def _owner(self, file: Any) -> int:
        return next((c.process.number for c in self.cast if file in c.process.files.values()), -1)

    def late_calls(self) -> list[tuple[int, Process, Call]]:
        """Calls in flight that could still take effect, and would be seen."""
        found = []
        for number, cast in enumerate(self.cast):
            process, call = self._in_flight(number)
            is_in_flight = cast.ghost is not None or not process.is_dead
            if is_in_flight and call is not None and is_visible(call):
                found.append((number, process, call))
        return found


def _in_words(argument: Any) -> str:
    return f"{len(argument)} bytes" if isinstance(argument, bytes) else str(argument)


def make_late(ghost: Process, call: Call) -> None:
    """A call of a dead process takes effect; nobody hears of its result."""
    try:
        call.effect(ghost.disk, ghost, *call.args)
    except OSError:
        return


def footprint_of(disk: Disk, process: Process, call: Call) -> Footprint:
    """What a call would read and change now."""
    probe = disk.clone()
    probe.footprint = Footprint()
    make_late(process.ghost(probe), call)
    return probe.footprint
