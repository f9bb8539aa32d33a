"""The campaign of power cuts: real processes on real ext4, whose power goes at a chosen call.

The remote tier and each node are a file system of their own. Who loses power changes from round to
round, and so does what ext4 does for programs that forget to sync. Started as a program
(`python -m tidegate_crash.power_run`): it has mounts of its own and forks without torch and
threads; it writes its tally to standard output.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, product
from pathlib import Path

from tidegate_crash.kills import Ended, Process, Trigger
from tidegate_crash.kills_campaign import (
    PLANTS,
    Point,
    Tally,
    build_parser,
    in_lanes,
    make_templates,
    share_of,
    spread_points,
    tally_of,
    until_struck,
    write_tally,
)
from tidegate_crash.kills_judge import Judge, lay_out, mounts_in, place_in, those_with
from tidegate_crash.power import Disk, Ordering, keep_mounts_private, settle
from tidegate_crash.scenario import Fault


class Reach(StrEnum):
    """Whose power goes.

    Attributes:
        ALL: of all machines: every process ends there.
        NODE: of the victim's node: the processes of that node end, the others go on.
        REMOTE: of the file server: all processes go on and meet its errors.
    """

    ALL = "all"
    NODE = "node"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One round.

    Attributes:
        point: at which call.
        reach: whose power goes.
        ordering: of the file systems.
        is_journal_written: the journal's timer came just before.
    """

    point: Point
    reach: Reach
    ordering: Ordering
    is_journal_written: bool

    @property
    def machines(self) -> tuple[int, ...]:
        """Indices of the disks: 0 is the remote tier's, 1 + n that of node n."""
        node = self.point.template.scenario.nodes[self.point.actor]
        match self.reach:
            case Reach.ALL:
                return (0, 1, 2)
            case Reach.NODE if node is not None:
                return (1 + node,)
            case _:
                return (0,)

    def ends(self, actor: int) -> bool:
        """Whether this actor's process loses its power, too."""
        node = self.point.template.scenario.nodes[actor]
        return self.reach is Reach.ALL or (node is not None and 1 + node in self.machines)


def plan_cuts(points: Iterable[Point]) -> list[Cut]:
    """Rounds at these calls, with all kinds of cuts in turn."""
    kinds = cycle(product(Ordering, (False, True), Reach))
    return [
        Cut(point=point, reach=reach, ordering=ordering, is_journal_written=is_journal_written)
        for point, (ordering, is_journal_written, reach) in zip(points, kinds, strict=False)
    ]


def cut_at(cut: Cut, disks: Sequence[Disk], root: Path, plant: Callable[[], None]) -> list[Ended]:
    """Runs the scenario until power goes at that call, and turns power on again."""
    point, place = cut.point, place_in(root)
    known, hit = point.template.history, [disks[index] for index in cut.machines]

    def fall() -> None:
        for disk in hit:
            disk.cut(is_journal_written=cut.is_journal_written)

    def run(at: int) -> list[Ended]:
        lay_out(point.template, root)
        for disk in disks:
            settle(disk.folder)
        trigger = Trigger(at=at, fall=fall, is_fatal=cut.ends(point.actor))
        processes = [
            Process(actor, place, known, trigger if index == point.actor else None, plant)
            for index, actor in enumerate(point.template.scenario.actors)
        ]
        return _end(cut, processes)

    ended = until_struck(point, run)
    for disk in hit:
        disk.unmount()
        disk.mount()
    return ended


def _end(cut: Cut, processes: Sequence[Process]) -> list[Ended]:
    """Waits for the victim first: who is on the same machine ends with it, not by itself."""
    victim = cut.point.actor
    ended = {victim: processes[victim].wait()}
    for index, process in enumerate(processes):
        if index != victim:
            if ended[victim].is_killed and cut.ends(index):
                process.kill()
            ended[index] = process.wait()
    return [ended[index] for index in range(len(processes))]


def run_cuts(points: Sequence[Point], root: Path, plant: Callable[[], None]) -> list[Tally]:
    """Cuts power at each of these calls, and judges what is there afterwards.

    Args:
        points: at which calls.
        root: a folder to work in.
        plant: called first in the actors' processes.

    Returns:
        The tally of each lane.
    """

    def run(lane: int) -> Tally:
        keep_mounts_private()
        tally, judge = Tally(), Judge()
        cuts = plan_cuts(share_of(lane, points))
        for ordering in Ordering:
            place = root / f"lane-{lane}-{ordering}"
            with ExitStack() as stack:
                disks = [_make_disk(mount, ordering, stack) for mount in mounts_in(place)]
                for cut in cuts:
                    if cut.ordering is ordering:
                        ended = cut_at(cut, disks, place, plant)
                        tally.cuts += 1
                        tally.kills += sum(one.is_killed for one in ended)
                        found = judge.judge(cut.point.template, place, ended)
                        tally.add(_describe(cut, ended), found)
        tally.states = judge.states
        return tally

    return in_lanes(run)


def _make_disk(mount: Path, ordering: Ordering, stack: ExitStack) -> Disk:
    mount.mkdir(parents=True)
    disk = Disk.make(mount, ordering)
    stack.callback(disk.close)
    return disk


def _describe(cut: Cut, ended: Sequence[Ended]) -> str:
    point = cut.point
    return (
        f"{point.template.name}, actor {point.actor}, call {point.at} "
        f"({ended[point.actor].struck}), power of {cut.reach}, {cut.ordering} ordering, "
        f"journal {'written' if cut.is_journal_written else 'not written'}"
    )


def main(words: Sequence[str] | None = None) -> None:
    """Runs a campaign and writes its tally."""
    parser = build_parser(run_cuts.__doc__)
    parser.add_argument("--cuts", type=int, required=True)
    asked = parser.parse_args(words)
    templates = make_templates(asked.scenarios or those_with(Fault.CUT), asked.folder)
    points = spread_points(templates, asked.cuts, asked.only)
    parts = run_cuts(points, asked.folder, PLANTS[asked.plant])
    write_tally(tally_of(templates, points, parts))


if __name__ == "__main__":
    main()
