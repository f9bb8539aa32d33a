"""Judges states: what a reader sees in them, and what everybody's second run makes of them.

A state is a disk as it can be seen, and what was promised until then; each distinct one is judged
once. From a moment of a run come: the state itself (all are killed), what a power cut leaves, a
lost disk, a flipped bit, and a call of a dead process that arrives during the second run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tidegate_crash.cuts import apply_cut, enumerate_cuts, machines_at_risk
from tidegate_crash.disk import Disk
from tidegate_crash.nodes import File, Footprint
from tidegate_crash.process import Call, Process, World
from tidegate_crash.scenario import Check, Fact, Fault, History, Place, Scenario
from tidegate_crash.schedule import make_late

RECOVERS_AFTER_NS = 7200 * 10**9
"""Longer than the grace of `.trash`."""
_FIRST_NUMBER = 8
_READER_NUMBER = 15
_FLIPPED_SUFFIX = ".distcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What is sampled of a moment, where all would be too much.

    Attributes:
        mixes: random outcomes of each power cut, besides the systematic ones.
        arrivals: moments of the second run at which a late call arrives; spread over those that
            make a difference, first and last included.
    """

    mixes: int = 2
    arrivals: int = 4


@dataclass(slots=True, kw_only=True)
class Counts:
    """What one exploration did.

    Attributes:
        scenario: its name.
        states: distinct states judged; bytes, names and promises count, times do not.
        schedules: runs of the actors.
        kills: boundaries at which everybody was killed.
        cuts: outcomes of power cuts, of everybody or of one actor that another survives.
        late: calls that arrived late, among the other actor's calls or those of the second run.
        failed_fsyncs: schedules with one.
        flips: of bits.
        lost_disks: of nodes.
        ids: of the states, alike in all scenarios and in processes of one hash seed.
        violations: what was found first, with the schedule; empty is what one hopes for.
    """

    scenario: str
    states: int = 0
    schedules: int = 0
    kills: int = 0
    cuts: int = 0
    late: int = 0
    failed_fsyncs: int = 0
    flips: int = 0
    lost_disks: int = 0
    ids: set[int] = field(default_factory=set, repr=False)
    violations: list[str] = field(default_factory=list)


class Judge:
    """Everything that was judged in one exploration."""

    def __init__(self, world: World, scenario: Scenario, place: Place, bounds: Bounds) -> None:
        """Nothing was judged yet."""
        self.counts = Counts(scenario=scenario.name)
        self._world = world
        self._scenario = scenario
        self._place = place
        self._bounds = bounds
        self._judged: set[tuple[int, int]] = set()
        self._finals: set[tuple[int, int]] = set()
        self._crashed: set[tuple[int, int]] = set()
        self._late: set[int] = set()
        self._calls: tuple[tuple[int, int], list[tuple[Footprint, Disk]]] = (-1, -1), []
        self._histories: dict[History, int] = {}

    # Moments of a run.

    def crash(self, disk: Disk, history: History) -> Iterator[str]:
        """All that may be left if everybody's work ends here; yields violations."""
        self.counts.kills += 1
        yield from self._in(self.state(disk, history), "all are killed")
        key = disk.state(), self._number(history)
        if key in self._crashed:
            return
        self._crashed.add(key)
        faults = self._scenario.faults
        if Fault.CUT in faults:
            yield from self._cuts(disk, history)
        if Fault.DISK in faults:
            yield from self._lost_disks(disk, history)
        if Fault.FLIP in faults:
            yield from self._flips(disk, history)

    def _cuts(self, disk: Disk, history: History) -> Iterator[str]:
        machines = sorted(machines_at_risk(disk))
        together = [[machine] for machine in machines]
        if len(machines) > 1:
            together.append(machines)
        for cut_off in together:
            for cut in enumerate_cuts(disk, cut_off, self._bounds.mixes, seed=self.counts.cuts):
                self.counts.cuts += 1
                words = f"power cut of {', '.join(cut_off)}: {cut.words}"
                yield from self._in(self.state(apply_cut(disk, cut), history), words)

    def _lost_disks(self, disk: Disk, history: History) -> Iterator[str]:
        for node in range(len(self._place.nodes)):
            self.counts.lost_disks += 1
            after, told = disk.clone(), history.copy()
            mount = after.lookup(1, f"node{node}")
            after.put(mount, after.directory(mount)._replace(names={}, durable={}))
            told.note(Fact.DISK_LOST, number=node)
            yield from self._in(self.state(after, told), f"the disk of node {node} is lost")

    def _flips(self, disk: Disk, history: History) -> Iterator[str]:
        for path, inode in disk.walk():
            node = disk.nodes[inode]
            is_data = path.startswith("/remote/") and path.endswith(_FLIPPED_SUFFIX)
            if not is_data or not isinstance(node, File) or not node.data:
                continue
            self.counts.flips += 1
            after, told = disk.clone(), history.copy()
            data = bytearray(node.data)
            bit = self.counts.flips * 7919 % (len(data) * 8)
            data[bit // 8] ^= 1 << bit % 8
            after.put(inode, node._replace(data=bytes(data), durable=bytes(data)))
            told.note(Fact.FLIPPED)
            yield from self._in(self.state(after, told), f"bit {bit} of {path} flips")

    def late(self, disk: Disk, history: History, process: Process, call: Call) -> Iterator[str]:
        """A dead process's call arrives during the second run, wherever that makes a difference."""
        files = tuple(sorted((fd, f.inode, f.offset) for fd, f in process.files.items()))
        key = hash((disk.state(), self._number(history), call.name, call.args, files))
        if key in self._late:
            return
        self._late.add(key)
        positions = list(self._find_arrivals(disk, history, process, call))
        for position in _spread(positions, self._bounds.arrivals):
            self.counts.late += 1
            after, told = disk.clone(), history.copy()
            arrival = _Arrival(process.ghost(after), call, position)
            found = self._recover(after, told, _FIRST_NUMBER, arrival.before)
            arrival.make()
            found += self.state(after, told, _FIRST_NUMBER + 1)
            words = f"its {call.name} arrives after {position} calls of the second run"
            yield from self._in(found, words)

    def _find_arrivals(
        self, disk: Disk, history: History, process: Process, call: Call
    ) -> Iterator[int]:
        """After which calls of the second run a late call does something new.

        Not where it fails, and not where the call before it does not meet it: one call earlier is
        the same. Before the first one it is no late call.
        """
        footprint = Footprint()
        for position, (done, after) in enumerate(self._second_run(disk, history)):
            if position == 0 or done.conflicts(footprint):
                before = after.state()
                after = after.clone()
                footprint = after.footprint = Footprint()
                make_late(process.ghost(after), call)
                if position > 0 and after.state() != before:
                    yield position

    def _second_run(self, disk: Disk, history: History) -> list[tuple[Footprint, Disk]]:
        """What each of its calls reads and changes when nothing is late, and the disk after it."""
        key = disk.state(), self._number(history)
        if self._calls[0] != key:
            calls = _Steps(disk.clone())
            self._recover(calls.disk, history.copy(), _FIRST_NUMBER, calls.before)
            self._calls = key, calls.end()
        return self._calls[1]

    # States.

    def state(self, disk: Disk, history: History, number: int = _FIRST_NUMBER) -> list[str]:
        """Violations in a state and after everybody's second run from there."""
        seen = disk.fingerprint()
        promised = self._number(history)
        key = seen.timed, promised
        if key in self._judged:
            return []
        self._judged.add(key)
        self.counts.ids.add(hash((seen.content, promised)))
        self.counts.states = len(self.counts.ids)
        found = self._check(self._scenario.check, disk, history)
        if found:
            return found
        after, told = disk.clone(), history.copy()
        found = self._recover(after, told, number, None)
        key = after.fingerprint().timed, self._number(told)
        if found or key in self._finals:
            return found
        self._finals.add(key)
        found = self._check(self._scenario.check_final, after, told)
        return [f"after the second run: {sentence}" for sentence in found]

    def _number(self, history: History) -> int:
        """By its words: the hash of None, which notes may hold, is another one in each process."""
        known = self._histories.get(history)
        if known is None:
            words = sorted(map(repr, history.notes)), sorted(history.complaints)
            known = self._histories[history.copy()] = hash(repr(words))
        return known

    @staticmethod
    def _in(found: list[str], words: str) -> Iterator[str]:
        for sentence in found:
            yield f"{words}: {sentence}"

    def _check(self, check: Check, disk: Disk, history: History) -> list[str]:
        found: list[str] = []
        process = Process("reader", "reader", _READER_NUMBER, disk.clone())
        self._world.run(process, lambda: found.extend(check(self._place, history)))
        return found

    def _recover(
        self, disk: Disk, history: History, number: int, gate: Callable[[Process], None] | None
    ) -> list[str]:
        disk.now += RECOVERS_AFTER_NS
        process = Process("second run", "second run", number, disk, gate=gate)
        try:
            self._world.run(process, lambda: self._scenario.recover(self._place, history))
        except Exception as error:  # noqa: BLE001  # nothing disturbs it: it has no reason to fail
            return [f"the second run raised {error!r}"]
        return []


def _spread(positions: list[int], most: int) -> list[int]:
    """So many of them, evenly, with the first and the last one."""
    if len(positions) <= most:
        return positions
    return [positions[n * (len(positions) - 1) // (most - 1)] for n in range(most)]


class _Arrival:
    """Makes a dead process's call before a certain call of another one."""

    def __init__(self, ghost: Process, call: Call, position: int) -> None:
        self._ghost = ghost
        self._late: Call | None = call
        self._left = position

    def before(self, _: Process) -> None:
        if self._left == 0:
            self.make()
        self._left -= 1

    def make(self) -> None:
        if self._late is not None:
            call, self._late = self._late, None
            make_late(self._ghost, call)


class _Steps:
    """What each call of a process reads and changes, and the disk after it; first: before all."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        disk.footprint = Footprint()
        self._found: list[tuple[Footprint, Disk]] = []

    def before(self, _: Process | None = None) -> None:
        done, self.disk.footprint = self.disk.footprint or Footprint(), Footprint()
        self._found.append((done, self.disk.clone()))

    def end(self) -> list[tuple[Footprint, Disk]]:
        self.before()
        return self._found
