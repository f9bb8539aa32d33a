"""Lays out a scenario on real folders, and judges what a kill or a cut left there.

The judge runs the scenario's checks, everybody's second run, the final checks, and compares bytes.
That comparison knows nothing of seals and digests: whatever an undisturbed run ever had under a
final name in a step folder is what may be there, byte for byte, at any moment. Called by the
campaigns in `kills_run` and `power_run`.
"""

import hashlib
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tidegate_contract.layout import COMMIT, is_temp_file, parse_step_folder, parse_temp_file
from tidegate_crash.kills import RAISED, SYNCS, Ended, Process, leave_out
from tidegate_crash.kills_child import Child, Tell
from tidegate_crash.kills_large import LARGE_COPY
from tidegate_crash.scenario import Actor, Fault, History, Place, Scenario
from tidegate_crash.scenarios import scenarios

_MOUNTS = ("remote", "node0", "node1")


def place_in(root: Path) -> Place:
    """The run's folders below a folder, laid out as on the simulated disk."""
    return Place(
        remote=str(root / "remote/team/run"),
        nodes=(str(root / "node0/team/run"), str(root / "node1/team/run")),
        remote_root=str(root / "remote/team"),
    )


def mounts_in(root: Path) -> tuple[Path, ...]:
    """The remote tier's root and the nodes', one file system each where power is cut."""
    return tuple(root / name for name in _MOUNTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A scenario ready to be run many times; it passes between processes.

    Attributes:
        name: of the scenario.
        root: what `prepare` left, to be copied.
        history: what it promised.
        calls: names of those that each actor makes undisturbed, and `THE_END`.
        contents: (step folder, file) → digests of what an undisturbed run has there.
    """

    name: str
    root: Path
    history: History
    calls: tuple[tuple[str, ...], ...]
    contents: Mapping[tuple[str, str], frozenset[bytes]]

    @property
    def scenario(self) -> Scenario:
        """Who acts, and what must hold."""
        return all_scenarios()[self.name]


@cache
def all_scenarios() -> Mapping[str, Scenario]:
    """Those of the simulated disk, and one whose files are too large for it."""
    return {scenario.name: scenario for scenario in [*scenarios(), LARGE_COPY]}


def those_with(fault: Fault) -> list[str]:
    """Names of the scenarios of the simulated disk to which a kind of fault applies."""
    return [scenario.name for scenario in scenarios() if fault in scenario.faults]


def make_template(name: str, root: Path) -> Template:
    """Prepares a scenario in an empty folder and runs it once undisturbed."""
    scenario = all_scenarios()[name]
    prepared, tried = root / "prepared", root / "tried"
    for mount in mounts_in(prepared):
        mount.mkdir(parents=True)
    contents: dict[tuple[str, str], set[bytes]] = defaultdict(set)
    history = _run(scenario.prepare, prepared, History(), contents).history
    shutil.copytree(prepared, tried, symlinks=True)
    known, calls = history, []
    for actor in scenario.actors:
        ended = _run(actor, tried, known, contents)
        known = ended.history
        calls.append(ended.calls)
    _run(scenario.recover, tried, known, contents)
    shutil.rmtree(tried)
    return Template(
        name=name,
        root=prepared,
        history=history,
        calls=tuple(calls),
        contents={key: frozenset(digests) for key, digests in contents.items()},
    )


def lay_out(template: Template, root: Path) -> None:
    """Puts what `prepare` left into a folder whose mounts may exist and are emptied."""
    for source, mount in zip(mounts_in(template.root), mounts_in(root), strict=True):
        mount.mkdir(parents=True, exist_ok=True)
        for entry in mount.iterdir():
            if entry.name != "lost+found":
                shutil.rmtree(entry)
        shutil.copytree(source, mount, symlinks=True, dirs_exist_ok=True)


def merge_histories(known: History, *ended: Ended) -> History:
    """Everything that was promised, by whomever."""
    histories = [known, *(one.history for one in ended)]
    return History(
        frozenset().union(*(one.notes for one in histories)),
        frozenset().union(*(one.complaints for one in histories)),
    )


class Judge:
    """Judges what rounds left behind; what it has seen before it knows."""

    def __init__(self) -> None:
        """Has seen nothing."""
        self._verdicts: dict[tuple[str, bytes, History], list[str]] = {}

    @property
    def states(self) -> int:
        """Distinct pairs of what lay on the disks and what was promised."""
        return len(self._verdicts)

    def judge(self, template: Template, root: Path, ended: list[Ended]) -> list[str]:
        """The violations in what is there now, and in what a second run makes of it."""
        history = merge_histories(template.history, *ended)
        defects = [f"I5 {one.defect}" for one in ended if one.defect]
        state = (template.name, _fingerprint(root), history)
        if state not in self._verdicts:
            self._verdicts[state] = _find_violations_apart(template, root, history)
        return [*defects, *self._verdicts[state]]


def _fingerprint(root: Path) -> bytes:
    """What lies there, whatever the random part of a temporary name and the times."""
    entries = []
    for path in root.rglob("*"):
        final = parse_temp_file(path.name)
        name = path.name if final is None else f"unfinished {final}"
        digest = _digest(path) if path.is_file() else b""
        entries.append((str(path.parent.relative_to(root)), name, digest))
    return hashlib.sha256(repr(sorted(entries)).encode()).digest()


def _find_violations_apart(template: Template, root: Path, history: History) -> list[str]:
    """In a process of its own.

    Production leaves closing to the end of its process, and a folder that stays open here would
    keep a file system mounted. Nothing is killed or cut from here on, so nothing is synced.
    """

    def look(tell: Tell) -> None:
        leave_out(SYNCS)
        for sentence in _find_violations(template, root, history):
            tell(sentence)

    heard = Child(look).wait()
    return [*heard.told, *([f"I5 {heard.defect}"] if heard.defect else [])]


def _find_violations(template: Template, root: Path, history: History) -> Iterator[str]:
    place = place_in(root)
    yield from template.scenario.check(place, history)
    yield from _foreign_bytes(template, root)
    try:
        template.scenario.recover(place, history)
    except RAISED as error:
        yield f"I5 the second run fails: {type(error).__name__}: {error}"
        return
    yield from template.scenario.check_final(place, history)
    yield from _foreign_bytes(template, root)


def _run(
    actor: Actor, root: Path, known: History, contents: dict[tuple[str, str], set[bytes]]
) -> Ended:
    ended = Process(actor, place_in(root), known, plant=partial(leave_out, SYNCS)).wait()
    assert not ended.defect, ended.defect
    for key, path in _final_files(root):
        contents[key].add(_digest(path))
    return ended


def _foreign_bytes(template: Template, root: Path) -> list[str]:
    return [
        f"I2 {path.relative_to(root)}: its bytes are none that an undisturbed run has there"
        for key, path in _final_files(root)
        if key in template.contents and _digest(path) not in template.contents[key]
    ]


def _final_files(root: Path) -> Iterator[tuple[tuple[str, str], Path]]:
    """Files under final names of all step folders; COMMIT, which tells the time, is left out."""
    for path in root.rglob("*"):
        name, folder = path.name, path.parent.name
        if parse_step_folder(folder) is None or is_temp_file(name) or name == COMMIT:
            continue
        if path.is_file() and not path.is_symlink():
            yield (f"{path.relative_to(root).parts[0]}/{folder}", name), path


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
