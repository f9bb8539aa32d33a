"""The campaign of kills: each round runs a scenario's actors for real and kills one of them.

Most are killed at a chosen file system call; the calls are spread evenly over all calls of all
actors of all scenarios. Some are killed at a random moment while larger files are copied, where
the kernel is in the middle of a call. Started as a program (`python -m tidegate_crash.kills_run`),
so that it forks from a process without torch and threads; it writes its tally to standard output.
"""

import random
import time
from collections.abc import Callable, Sequence
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
from tidegate_crash.kills_judge import Judge, Template, lay_out, place_in, those_with
from tidegate_crash.kills_large import LARGE_COPY
from tidegate_crash.scenario import Fault


def kill_at(point: Point, root: Path, plant: Callable[[], None]) -> list[Ended]:
    """Runs the scenario in a folder until one of its actors was killed at that call."""
    place, template = place_in(root), point.template

    def run(at: int) -> list[Ended]:
        lay_out(template, root)
        trigger = Trigger(at=at)
        processes = [
            Process(
                actor, place, template.history, trigger if index == point.actor else None, plant
            )
            for index, actor in enumerate(template.scenario.actors)
        ]
        return [process.wait() for process in processes]

    return until_struck(point, run)


def run_kills(points: Sequence[Point], root: Path, plant: Callable[[], None]) -> list[Tally]:
    """Kills at each of these calls, and judges what is there afterwards.

    Args:
        points: at which calls.
        root: a folder to work in.
        plant: called first in the actors' processes.

    Returns:
        The tally of each lane.
    """

    def run(lane: int) -> Tally:
        tally, judge, place = Tally(), Judge(), root / f"lane-{lane}"
        for point in share_of(lane, points):
            ended = kill_at(point, place, plant)
            tally.kills += 1
            call = f"call {point.at} ({ended[point.actor].struck})"
            where = f"{point.template.name}, actor {point.actor}, {call}"
            tally.add(where, judge.judge(point.template, place, ended))
        tally.states = judge.states
        return tally

    return in_lanes(run)


def run_moments(template: Template, root: Path, count: int, seed: int) -> Tally:
    """Kills the only actor of a scenario at so many random moments, and judges each."""
    draw, tally, judge = random.Random(seed), Tally(), Judge()
    (actor,) = template.scenario.actors
    moment = seconds = float("inf")
    while tally.kills < count:
        lay_out(template, root)
        started = time.monotonic()
        process = Process(actor, place_in(root), template.history)
        if moment < seconds:
            time.sleep(moment)  # no call to wait for: the moment is what is tried
            process.kill()
        ended = process.wait()
        if ended.is_killed:
            tally.kills += 1
            where = f"{template.name}, after {moment:.4f} of {seconds:.4f} s"
            tally.add(where, judge.judge(template, root, [ended]))
        else:
            seconds = time.monotonic() - started
        moment = draw.uniform(0, seconds)
    tally.states = judge.states
    return tally


def main(words: Sequence[str] | None = None) -> None:
    """Runs a campaign and writes its tally."""
    parser = build_parser(run_kills.__doc__)
    parser.add_argument("--kills", type=int, required=True, help="at calls")
    parser.add_argument("--moments", type=int, default=0, help="at random moments of a copy")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    asked = parser.parse_args(words)
    (large,) = make_templates([LARGE_COPY.name], asked.folder)
    moments = run_moments(large, asked.folder / "moments", asked.moments, asked.seed)
    templates = make_templates(asked.scenarios or those_with(Fault.KILL), asked.folder)
    points = spread_points(templates, asked.kills, asked.only)
    parts = run_kills(points, asked.folder, PLANTS[asked.plant])
    write_tally(tally_of(templates, points, [*parts, moments]))


if __name__ == "__main__":
    main()
