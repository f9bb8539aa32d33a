"""What the campaigns of kills and of power cuts share: which calls, two lanes, one tally.

The lanes are processes side by side: one computes while the other waits for its disk.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tidegate_crash.kills import SYNCS, THE_END, Ended, leave_out, write_in_place
from tidegate_crash.kills_child import Child
from tidegate_crash.kills_judge import Template, make_template

LANES = 2
PLANTS: Mapping[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "no-sync": partial(leave_out, SYNCS),
    "in-place": write_in_place,
}
"""Faults that a campaign must find; planted into the actors' processes alone."""
_MAX_SENTENCES = 20
_TRIES = 8


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a campaign did and found.

    Attributes:
        kills: processes ended by SIGKILL.
        cuts: rounds in which power went, of however many machines.
        points: distinct calls (scenario, actor, how-manieth) at which that happened.
        calls: that all actors make undisturbed, their ends included.
        states: distinct pairs of what lay on the disks then and what was promised.
        torn: violations of "nothing torn, mixed or foreign is offered, nothing wrong restored".
        lost: of "a sealed step stays, the last commit survives".
        stuck: of "a second run finishes the work".
        sentences: the first violations in words.
    """

    kills: int = 0
    cuts: int = 0
    points: int = 0
    calls: int = 0
    states: int = 0
    torn: int = 0
    lost: int = 0
    stuck: int = 0
    sentences: list[str] = field(default_factory=list)

    def add(self, where: str, found: list[str]) -> None:
        """Takes the violations of one round; each begins with the name of its invariant."""
        for sentence in found:
            match sentence.split()[0]:
                case "I1" | "I3":
                    self.lost += 1
                case "I2" | "I4":
                    self.torn += 1
                case _:
                    self.stuck += 1
            self.sentences.append(f"{where}: {sentence}")
        del self.sentences[_MAX_SENTENCES:]

    def in_words(self) -> str:
        """The counts, a sentence."""
        return (
            f"{self.kills} kills and {self.cuts} power cuts at {self.points} of {self.calls} calls"
            f" left {self.states} states: {self.torn} torn, {self.lost} lost, {self.stuck} stuck"
        )

    def merge(self, other: "Tally") -> None:
        """Takes over what another part of the same campaign did and found."""
        self.kills += other.kills
        self.cuts += other.cuts
        self.states += other.states
        self.torn += other.torn
        self.lost += other.lost
        self.stuck += other.stuck
        self.sentences = [*self.sentences, *other.sentences][:_MAX_SENTENCES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One call of one actor of one scenario.

    Attributes:
        template: the scenario.
        actor: index of the victim.
        at: as in `kills.Trigger`.
    """

    template: Template
    actor: int
    at: int

    @property
    def key(self) -> tuple[str, int, int]:
        """What makes it distinct."""
        return (self.template.name, self.actor, self.at)


def in_lanes(work: Callable[[int], Any]) -> list[Any]:
    """Calls `work` with the number of each lane, in processes side by side.

    Raises:
        RuntimeError: it failed in one of them.
    """
    heard = [child.wait() for child in [_start_lane(work, lane) for lane in range(LANES)]]
    for one in heard:
        if one.defect or one.is_killed:
            raise RuntimeError(one.defect or "a lane was killed")
    return [one.told[0] for one in heard]


def _start_lane(work: Callable[[int], Any], lane: int) -> Child:
    return Child(lambda tell: tell(work(lane)))


def make_templates(names: Sequence[str], root: Path) -> list[Template]:
    """Scenarios, prepared below a folder."""

    def prepare(lane: int) -> list[Template]:
        return [make_template(name, root / name) for name in names[lane::LANES]]

    made = [template for templates in in_lanes(prepare) for template in templates]
    return sorted(made, key=lambda template: names.index(template.name))


def spread_points(templates: Sequence[Template], count: int, only: str = "") -> list[Point]:
    """So many calls, evenly over all calls of all actors; all over and over if there are fewer.

    Args:
        templates: the scenarios.
        count: how many.
        only: calls of this name; empty takes all, the ends included.
    """
    every = [
        Point(template=template, actor=actor, at=at)
        for template in templates
        for actor, calls in enumerate(template.calls)
        for at, call in enumerate(calls, 1)
        if only in ("", call)
    ]
    rounds, rest = divmod(count, len(every))
    return every * rounds + [every[index * len(every) // rest] for index in range(rest)]


def until_struck(point: Point, run: Callable[[int], list[Ended]]) -> list[Ended]:
    """Runs the scenario until its victim was met at that call.

    With another actor beside it the victim may need fewer calls than alone; then an earlier one is
    taken.

    Args:
        point: at which call of whom.
        run: runs all actors, the victim to be met at the call of this number.

    Raises:
        AssertionError: it ended before each of the calls that were tried.
    """
    at = point.at
    for _ in range(_TRIES):
        ended = run(at)
        if ended[point.actor].struck:
            return ended
        at = max(1, len(ended[point.actor].calls) - 1)
    raise AssertionError(f"{point.template.name}: never met at call {point.at}")


def share_of(lane: int, points: Sequence[Point]) -> list[Point]:
    """A lane's points: whole scenarios, so that no state is judged in two lanes."""
    names = list(dict.fromkeys(point.template.name for point in points))
    return [point for point in points if names.index(point.template.name) % LANES == lane]


def tally_of(templates: Sequence[Template], points: Sequence[Point], parts: list[Tally]) -> Tally:
    """The tally of a campaign that was run in lanes."""
    tally = Tally(
        calls=sum(len(calls) for template in templates for calls in template.calls),
        points=len({point.key for point in points}),
    )
    for part in parts:
        tally.merge(part)
    return tally


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of all campaigns."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, required=True, help="an empty one to work in")
    parser.add_argument("--scenarios", nargs="*", help="names; all to which the fault applies")
    parser.add_argument("--only", default="", help=f"calls of this name, such as {THE_END!r}")
    parser.add_argument("--plant", choices=PLANTS, default="nothing", help="a fault in production")
    return parser


def write_tally(tally: Tally) -> None:
    """Writes a tally to standard output, a JSON object."""
    json.dump(asdict(tally), sys.stdout)


def run_program(module: str, folder: Path, *options: str) -> Tally:
    """Runs a campaign as a program of its own, and returns its tally.

    Raises:
        RuntimeError: it failed; carries what it wrote.
    """
    command = [sys.executable, "-m", module, "--folder", str(folder), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return Tally(**json.loads(done.stdout))
