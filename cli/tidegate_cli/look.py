"""What lies in a run's folder, of either tier: everything, also what no reader takes. Reads only.

`contract.scan` leaves out what does not count; a person wants to see it, too. Called by the
verbs.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tidegate_cli.terminal import naming, sentence_of
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, Pin, RunIdentity
from tidegate_contract.layout import (
    COMMIT,
    CONTROL_DOCUMENT,
    LINEAGES,
    MANIFEST,
    PINS,
    QUARANTINE,
    ROOT_ID,
    RUN_DOCUMENT,
    TIER_DOCUMENT,
    TRASH,
    Attempt,
    is_temp_file,
    parse_announced_file,
    parse_quarantined_file,
    parse_seal_file,
    parse_state_file,
    parse_step_folder,
    step_folder,
)
from tidegate_contract.restore_point import order_key
from tidegate_contract.run_documents import (
    read_document,
    read_identity,
    scan_claims,
    scan_pins,
)
from tidegate_contract.scan import StepRecord, scan_step
from tidegate_contract.seal import Commit, Manifest, Seal

T = TypeVar("T")

FLOW_DOCUMENT = "flow.json"
_KNOWN = frozenset(
    {
        RUN_DOCUMENT,
        CONTROL_DOCUMENT,
        FLOW_DOCUMENT,
        ROOT_ID,
        TIER_DOCUMENT,
        LINEAGES,
        PINS,
        TRASH,
        QUARANTINE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run's folder on one tier.

    Attributes:
        path: as the person gave it.
        identity: from its `run.json`.
        records: of all step folders, `.trash` included, by attempt.
        unreadable: step folder → a sentence on why it could not be read.
        newer: step folders with which nothing is wrong but that a newer release wrote them.
        claims: lineage claims; on a local tier mirrors, and those made without the remote tier.
        pins: attempt → pin; None where its document is damaged: it holds all the same.
        quarantined: attempt → its damaged files that were moved aside.
        unknown: names that the format does not know; nobody touches them.
        problems: a sentence for everything else that could not be read.
    """

    path: str
    identity: RunIdentity
    records: tuple[StepRecord, ...]
    unreadable: dict[str, str] = field(default_factory=dict)
    newer: frozenset[str] = frozenset()
    claims: tuple[LineageClaim, ...] = ()
    pins: dict[Attempt, Pin | None] = field(default_factory=dict)
    quarantined: dict[Attempt, tuple[str, ...]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def key(self, record: StepRecord) -> tuple[int, int, str]:
        """What "newer" means: (lineage, step), an explicit restore re-dating what it named."""
        return order_key(record.attempt, lineage_of(record), self.claims)


def lineage_of(record: StepRecord) -> int:
    """Of the manifest or of any seal; 0 where nothing says so."""
    if record.committed is not None:
        return record.committed.manifest.lineage
    known = record.announced | record.seals
    return known[min(known)].lineage if known else 0


def is_in_trash(record: StepRecord) -> bool:
    """Moved aside; it may still be restored from there."""
    return record.folder.startswith(f"{TRASH}/")


@contextmanager
def open_run(path: Path) -> Iterator[tuple[Folder, RunIdentity]]:
    """The open folder of a run and its identity.

    Raises:
        Reject: the folder holds no run.
        Corrupt, OSError: it cannot be read.
    """
    with Folder.open(path) as run, naming(path):
        identity = read_identity(run)
        if identity is None:
            raise Reject(f"{path}: no {RUN_DOCUMENT}, so this is not a run's folder{_hint(path)}")
        yield run, identity


def _hint(path: Path) -> str:
    if parse_step_folder(Path(os.path.realpath(path)).name) is not None:
        return " (it is a step's folder: its run is the folder above)"
    told = _told_attempt(path)
    if told is not None:
        name = step_folder(told)
        return f" (a step's folder under another name: its documents want {name})"
    below = sorted(path.glob(f"*/{RUN_DOCUMENT}")) or sorted(path.glob(f"*/*/{RUN_DOCUMENT}"))
    if below:
        return f" (runs lie below it, as {below[0].parent})"
    return ""


def _told_attempt(path: Path) -> Attempt | None:
    with Folder.open(path) as step, naming(path):
        return find_told(step, lambda document: document.attempt)


def find_told(step: Folder, ask: Callable[[Manifest | Seal], T]) -> T | None:
    """What the first readable document of an open step folder answers; None where none is."""
    for name in [MANIFEST, *(n for n in step.names() if parse_seal_file(n) is not None)]:
        kind: type[Manifest] | type[Seal] = Manifest if name == MANIFEST else Seal
        try:
            document = read_document(step, kind, name)
        except (Corrupt, Reject):
            continue  # another document may tell
        if document is not None:
            return ask(document)
    return None


def find_newer(step: Folder) -> frozenset[str]:
    """The sentences on documents of an open step folder that a newer release wrote."""
    sentences = set()
    for name in step.names():
        kind = _kind_of(name)
        try:
            if kind is not None:
                read_document(step, kind, name)
        except Reject as error:
            sentences.add(str(error))
        except (OSError, Corrupt):
            continue  # told by whoever reads the step
    return frozenset(sentences)


def _kind_of(name: str) -> type[Commit] | type[Manifest] | type[Seal] | None:
    if name == COMMIT:
        return Commit
    if name == MANIFEST:
        return Manifest
    is_seal = parse_seal_file(name) is not None or parse_announced_file(name) is not None
    return Seal if is_seal else None


def look_at_run(path: Path) -> RunView:
    """Everything in a run's folder; what cannot be read is a sentence in the view.

    Raises:
        Reject: the folder holds no run, or one of a newer release.
        Corrupt: its `run.json` is damaged.
        OSError: the folder itself cannot be read.
    """
    with open_run(path) as (run, identity):
        unreadable: dict[str, str] = {}
        newer: set[str] = set()
        problems: list[str] = []
        records = [*_scan_inside(run, "", identity.run_id, (unreadable, newer))]
        trash = _child(run, TRASH, problems)
        if trash is not None:
            with trash:
                inside = (unreadable, newer)
                records += _scan_inside(trash, f"{TRASH}/", identity.run_id, inside)
        return RunView(
            path=str(path),
            identity=identity,
            records=tuple(sorted(records, key=lambda record: record.attempt)),
            unreadable=unreadable,
            newer=frozenset(newer),
            claims=_claims(run, identity.run_id, problems),
            pins=_pins(run, problems),
            quarantined=_quarantined(run, problems),
            unknown=tuple(name for name in run.names() if not is_known_name(name)),
            problems=tuple(problems),
        )


def _scan_inside(
    folder: Folder, prefix: str, run_id: str, odd: tuple[dict[str, str], set[str]]
) -> Iterator[StepRecord]:
    unreadable, newer = odd
    for name in folder.names():
        attempt = parse_step_folder(name)
        if attempt is None:
            continue
        try:
            with naming(folder.path), folder.child(name) as step, naming(step.path):
                record = scan_step(step, attempt, f"{prefix}{name}", run_id)
                if record.problems and find_newer(step).issuperset(record.problems):
                    newer.add(record.folder)
        except FileNotFoundError:
            continue  # moved or removed since the listing
        except OSError as error:
            unreadable[f"{prefix}{name}"] = _why_unreadable(error)
            continue
        yield record


def _why_unreadable(error: OSError) -> str:
    if isinstance(error, NotADirectoryError):
        return f"{os.fsdecode(error.filename)}: not a folder, or a link to one"
    return sentence_of(error)


def _child(run: Folder, name: str, problems: list[str]) -> Folder | None:
    try:
        with naming(run.path):
            return run.child(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(_why_unreadable(error))
        return None


def _claims(run: Folder, run_id: str, problems: list[str]) -> tuple[LineageClaim, ...]:
    try:
        with naming(f"{run.path}/{LINEAGES}"):
            return tuple(scan_claims(run, run_id))
    except (OSError, Corrupt, Reject) as error:
        problems.append(f"{run.path}/{LINEAGES} cannot be read: {sentence_of(error)}")
        return ()


def _pins(run: Folder, problems: list[str]) -> dict[Attempt, Pin | None]:
    try:
        with naming(f"{run.path}/{PINS}"):
            return scan_pins(run)
    except OSError as error:
        problems.append(f"{run.path}/{PINS} cannot be read: {sentence_of(error)}")
        return {}


def _quarantined(run: Folder, problems: list[str]) -> dict[Attempt, tuple[str, ...]]:
    folder = _child(run, QUARANTINE, problems)
    if folder is None:
        return {}
    found: dict[Attempt, tuple[str, ...]] = {}
    with folder:
        for name in folder.names():
            attempt = parse_quarantined_file(name)
            if attempt is not None:
                found[attempt] = (*found.get(attempt, ()), name)
    return found


def is_known_name(name: str) -> bool:
    """True for what the format puts into a run's folder, on either tier."""
    return (
        name in _KNOWN
        or parse_step_folder(name) is not None
        or parse_state_file(name) is not None
        or is_temp_file(name)
    )
