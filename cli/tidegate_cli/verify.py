"""`tidegate verify`: reads back every byte of a run or a step, on either tier. Never writes."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tidegate_cli.look import find_newer, find_told, look_at_run, open_run
from tidegate_cli.terminal import (
    bytes_progress,
    fail,
    naming,
    say,
    say_json,
    sentence_of,
    show_size,
    warn,
)
from tidegate_contract.errors import Reject, TidegateError
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, Pin, Trained
from tidegate_contract.layout import (
    LINEAGES,
    PINS,
    TRASH,
    Attempt,
    lineage_file,
    parse_lineage_file,
    parse_pin_file,
    parse_step_folder,
    parse_trained_file,
    pin_file,
    step_folder,
    trained_file,
)
from tidegate_contract.run_documents import read_document
from tidegate_contract.scan import scan_step
from tidegate_contract.verify import size_to_verify, verify_step


class Verdict(StrEnum):
    """What became of one step."""

    SOUND = "sound"
    DAMAGED = "damaged"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One step folder to read.

    Attributes:
        path: of the folder.
        attempt: that its documents must name.
        run_id: that its documents must name.
        lack: why it cannot be opened; empty where it can.
    """

    path: Path
    attempt: Attempt
    run_id: str
    lack: str = ""


@dataclass(slots=True, kw_only=True)
class Reading:
    """What was found so far.

    Attributes:
        run: its name; None where only one step's folder is known.
        problems: of documents and folders that are no step's.
        steps: target, verdict, bytes read and problems, in the order they were read.
        is_whole: nothing was left out.
    """

    run: str | None = None
    problems: list[str] = field(default_factory=list)
    steps: list[tuple[Target, Verdict, int, list[str]]] = field(default_factory=list)
    is_whole: bool = True

    def count(self, verdict: Verdict) -> int:
        """Steps of this verdict."""
        return sum(1 for _, found, _, _ in self.steps if found is verdict)

    @property
    def is_damaged(self) -> bool:
        """Anything is not as it was declared."""
        return bool(self.problems) or self.count(Verdict.DAMAGED) > 0


def verify(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", readable=False, help="a run's folder or one step's, of either tier"
        ),
    ],
    reads_all: Annotated[
        bool, typer.Option("--all", help="go on after the first damage and list everything")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document instead")] = False,
) -> None:
    """Read back every byte and compare it with what was sealed.

    Documents are checked, too: seals, receipts, manifest, COMMIT, lineages and pins. Of a run every
    step is read that anything is sealed in, newest first; steps in .trash only when you name them.
    """
    reading = Reading()
    targets = _find_targets(path, reading)
    if not targets and not reading.problems:
        fail(f"{path}: nothing is sealed here, so there is nothing to verify")
    _read_targets(targets, reading, stops_at_first=not reads_all, is_quiet=as_json)
    if as_json:
        say_json(_document(path, reading))
    else:
        _print(reading)
    is_bad = reading.is_damaged or reading.count(Verdict.UNKNOWN) > 0
    raise typer.Exit(1 if is_bad or not reading.count(Verdict.SOUND) else 0)


def _find_targets(path: Path, reading: Reading) -> list[Target]:
    real = Path(os.path.realpath(path))
    attempt = parse_step_folder(real.name)
    if attempt is not None:
        target = _one_target(path, real, attempt, reading)
        return [target] if _holds_anything(target) else []
    view = look_at_run(path)
    reading.run = view.identity.name
    with open_run(path) as (run, identity):
        reading.problems += _check_documents(run, identity.run_id)
    sound_first = [
        Target(path=path / record.folder, attempt=record.attempt, run_id=identity.run_id)
        for record in sorted(view.records, key=view.key, reverse=True)
        if not record.folder.startswith(TRASH)
        and (record.committed or record.seals or record.problems)
    ]
    inside = {name: why for name, why in view.unreadable.items() if not name.startswith(TRASH)}
    strange = [
        Target(path=path / name, attempt=attempt, run_id=identity.run_id, lack=why)
        for name, why in inside.items()
        if (attempt := parse_step_folder(name)) is not None
    ]
    return [*sound_first, *strange]


def _one_target(path: Path, real: Path, attempt: Attempt, reading: Reading) -> Target:
    """One step's folder; a copy that lies alone is judged by the run that its documents name."""
    above = real.parent.parent if real.parent.name == TRASH else real.parent
    try:
        with open_run(above) as (_, identity):
            reading.run = identity.name
            return Target(path=path, attempt=attempt, run_id=identity.run_id)
    except Reject:
        with Folder.open(real) as step, naming(real):
            return Target(path=path, attempt=attempt, run_id=_told_run_id(step))


def _holds_anything(target: Target) -> bool:
    with Folder.open(target.path) as step, naming(target.path):
        record = scan_step(step, target.attempt, str(target.path), target.run_id)
    return bool(record.committed or record.seals or record.problems)


def _told_run_id(step: Folder) -> str:
    run_id = find_told(step, lambda document: document.run_id)
    if run_id is None:
        raise Reject(f"{step.path}: no document tells which run this step belongs to")
    return run_id


def _check_documents(run: Folder, run_id: str) -> Iterator[str]:
    """Sentences on claims, words and pins that cannot be read, or are of another run."""
    for name, kind_of in ((LINEAGES, _lineage_kind), (PINS, _pin_kind)):
        try:
            with run.child(name) as folder:
                kinds = {file: kind for file in folder.names() if (kind := kind_of(file))}
                for file, kind in kinds.items():
                    yield from _check_document(folder, file, kind, run_id)
        except FileNotFoundError:
            continue  # this run has none
        except OSError as error:
            yield f"{run.path}/{name}: {error.strerror}"


def _lineage_kind(name: str) -> type[LineageClaim] | type[Trained] | None:
    if parse_lineage_file(name) is not None:
        return LineageClaim
    return Trained if parse_trained_file(name) is not None else None


def _pin_kind(name: str) -> type[Pin] | None:
    return Pin if parse_pin_file(name) is not None else None


def _check_document(
    folder: Folder, name: str, kind: type[LineageClaim] | type[Trained] | type[Pin], run_id: str
) -> Iterator[str]:
    try:
        with naming(folder.path):
            document = read_document(folder, kind, name)
    except (OSError, TidegateError) as error:
        yield sentence_of(error)
        return
    if document is None:
        return
    if document.run_id != run_id:
        yield f"{folder.path}/{name}: belongs to another run"
    if _name_of(document) != name:
        yield f"{folder.path}/{name}: is the document of {_name_of(document)}"


def _name_of(document: LineageClaim | Trained | Pin) -> str:
    match document:
        case LineageClaim():
            return lineage_file(document.number)
        case Trained():
            return trained_file(document.number)
        case Pin():
            return pin_file(document.attempt)


def _read_targets(
    targets: list[Target], reading: Reading, *, stops_at_first: bool, is_quiet: bool
) -> None:
    with bytes_progress(is_hidden=is_quiet) as progress:
        total = None if progress.disable else sum(_size_bytes(target) for target in targets)
        task = progress.add_task("verify", total=total)
        for number, target in enumerate(targets, 1):
            of = f" ({number} of {len(targets)})" if len(targets) > 1 else ""
            progress.update(task, description=f"step {target.attempt.step}{of}")
            done = [0]

            def count(size: int, done: list[int] = done) -> None:
                done[0] += size
                progress.advance(task, size)

            problems, verdict = _read_target(target, count, stops_at_first=stops_at_first)
            if _is_gone(target, verdict, done[0]):
                verdict = Verdict.GONE
            reading.steps.append((target, verdict, done[0], problems))
            if verdict is Verdict.DAMAGED and stops_at_first:
                reading.is_whole = False
                return


def _size_bytes(target: Target) -> int:
    try:
        with Folder.open(target.path) as step:
            return size_to_verify(step, target.attempt, target.run_id)
    except OSError:
        return 0  # told when it is read


def _read_target(
    target: Target, on_bytes: Callable[[int], None], *, stops_at_first: bool
) -> tuple[list[str], Verdict]:
    if target.lack:
        return [target.lack], Verdict.DAMAGED
    try:
        with Folder.open(target.path) as step, naming(target.path):
            told = find_told(step, lambda document: document.attempt)
            if told is not None and told != target.attempt:
                wanted = step_folder(told)
                return [f"{target.path}: its documents want the name {wanted}"], Verdict.DAMAGED
            newer = find_newer(step)
            problems = verify_step(
                step,
                target.attempt,
                target.run_id,
                on_bytes=on_bytes,
                stops_at_first=stops_at_first and not newer,
            )
    except OSError as error:
        return [sentence_of(error)], Verdict.DAMAGED
    if not problems:
        return [], Verdict.SOUND
    return problems, Verdict.UNKNOWN if newer.issuperset(problems) else Verdict.DAMAGED


def _is_gone(target: Target, verdict: Verdict, read_bytes: int) -> bool:
    """A step that retention took away meanwhile is not damaged, nor sound if all was gone."""
    is_read = verdict is Verdict.SOUND and read_bytes > 0
    return not is_read and not os.path.lexists(target.path)


def _print(reading: Reading) -> None:
    for problem in reading.problems:
        warn(problem)
    for target, verdict, _, problems in reading.steps:
        for problem in problems if verdict is not Verdict.GONE else []:
            warn(problem)
        if verdict is Verdict.GONE:
            warn(f"step {target.attempt.step} was removed while it was read")
    size = show_size(sum(read for _, _, read, _ in reading.steps))
    count = len(reading.steps)
    strange = reading.count(Verdict.UNKNOWN)
    newer = f", {strange} {'is' if strange == 1 else 'are'} of a newer release" if strange else ""
    say(
        f"{reading.count(Verdict.SOUND)} of {count} {'step' if count == 1 else 'steps'} "
        f"{'is' if count == 1 else 'are'} sound{newer}, {size} read"
    )
    if not reading.is_whole:
        say("stopped at the first damage; --all reads on")


def _document(path: Path, reading: Reading) -> dict[str, Any]:
    return {
        "run": reading.run,
        "path": str(path),
        "sound": reading.count(Verdict.SOUND),
        "damaged": reading.count(Verdict.DAMAGED),
        "unknown": reading.count(Verdict.UNKNOWN),
        "whole": reading.is_whole,
        "problems": reading.problems,
        "steps": [
            {
                "step": target.attempt.step,
                "attempt": target.attempt.nonce,
                "folder": str(target.path),
                "verdict": verdict,
                "read_bytes": read,
                "problems": problems,
            }
            for target, verdict, read, problems in reading.steps
        ],
    }
