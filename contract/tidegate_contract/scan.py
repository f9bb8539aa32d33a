"""The only reader of visibility: one run folder of one tier → records of what is really there.

Names, times and hints prove nothing: a step counts by its seals or its COMMIT, its files by their
declared sizes. Discovery, restore, retention and reports all ask here. Reads only; callers may be
any process that may read the folder.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tidegate_contract.digest import ContentHasher, sha256_hex
from tidegate_contract.document import decode
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, RunIdentity
from tidegate_contract.layout import (
    COMMIT,
    LINEAGES,
    MANIFEST,
    METADATA,
    RUN_DOCUMENT,
    TRASH,
    Attempt,
    parse_announced_file,
    parse_lineage_file,
    parse_seal_file,
    parse_step_folder,
)
from tidegate_contract.seal import Commit, FileEntry, Manifest, Seal, build_manifest

_READ_BYTES = 4 << 20
_UNKNOWN_TIME = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A step whose COMMIT matches its manifest and whose files have their declared sizes."""

    manifest: Manifest
    commit: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step folder holds.

    Attributes:
        attempt: step and nonce.
        folder: path relative to the run folder.
        seals: rank → seal whose files are all there at their sizes.
        announced: rank → announced seal (remote tier only).
        committed: None unless the whole step counts.
        problems: a sentence for everything that was refused.
    """

    attempt: Attempt
    folder: str
    seals: dict[int, Seal] = field(default_factory=dict)
    announced: dict[int, Seal] = field(default_factory=dict)
    committed: CommittedStep | None = None
    problems: tuple[str, ...] = ()

    @property
    def is_sealed_by_all(self) -> bool:
        """Every rank's seal, or its announcement, is here."""
        known = self.announced | self.seals
        return bool(known) and set(known) == set(range(next(iter(known.values())).world_size))


def read_identity(run: Folder) -> RunIdentity | None:
    """The run's `run.json`; None where there is none.

    Raises:
        Corrupt: it is damaged.
        Reject: a newer release wrote it.
    """
    data = run.read(RUN_DOCUMENT)
    return None if data is None else decode(RunIdentity, data, f"{run.path}/{RUN_DOCUMENT}")


def scan_claims(run: Folder, run_id: str) -> list[LineageClaim]:
    """All lineage claims of the run, by number; those of another run are left out.

    A damaged claim still takes its number: it comes back as one that restored nothing.

    Raises:
        OSError: the folder cannot be read.
        Reject: a newer release wrote a claim.
    """
    try:
        folder = run.child(LINEAGES)
    except FileNotFoundError:
        return []
    with folder:
        claims = []
        for name in folder.names():
            number = parse_lineage_file(name)
            claim = _read_claim(folder, name, number, run_id) if number else None
            if claim is not None:
                claims.append(claim)
    return sorted((c for c in claims if c.run_id == run_id), key=lambda claim: claim.number)


def _read_claim(folder: Folder, name: str, number: int, run_id: str) -> LineageClaim | None:
    try:
        data = folder.read(name)
        if data is None:
            return None
        claim = decode(LineageClaim, data, f"{folder.path}/{name}")
        if claim.number == number:
            return claim
    except Corrupt:
        pass
    return LineageClaim(run_id=run_id, number=number, claimed_at=_UNKNOWN_TIME)


def scan_steps(run: Folder, run_id: str) -> list[StepRecord]:
    """Records of all step folders, `.trash` included, by step; unknown names are not touched.

    Args:
        run: the run's folder on one tier.
        run_id: seals and manifests of any other run are refused.
    """
    records = _scan_inside(run, "", run_id)
    try:
        trash = run.child(TRASH)
    except FileNotFoundError:
        return records
    with trash:
        records += _scan_inside(trash, f"{TRASH}/", run_id)
    return sorted(records, key=lambda record: record.attempt)


def _scan_inside(folder: Folder, prefix: str, run_id: str) -> list[StepRecord]:
    records = []
    for name in folder.names():
        attempt = parse_step_folder(name)
        if attempt is None:
            continue
        try:
            step = folder.child(name)
        except OSError:
            continue  # moved or removed since the listing, or not a directory
        with step:
            records.append(scan_step(step, attempt, f"{prefix}{name}", run_id))
    return records


def scan_step(step: Folder, attempt: Attempt, folder: str, run_id: str) -> StepRecord:
    """The record of one open step folder.

    Args:
        step: the open folder.
        attempt: what its name says; documents of another attempt are refused.
        folder: its path relative to the run folder.
        run_id: documents of another run are refused.
    """
    problems: list[str] = []
    expected = (attempt, run_id)
    announced = _read_seals(step, parse_announced_file, expected, problems)
    sealed = _read_seals(step, parse_seal_file, expected, problems)
    sound = {}
    for rank, seal in sealed.items():
        # announcements exist on the remote tier only, and so do not the files of scope LOCAL there
        bad = find_wrong_size(step, seal.files if not announced else seal.flushed_files)
        if bad is None:
            sound[rank] = seal
        else:
            problems.append(f"{step.path}: seal of rank {rank}: {bad}")
    committed = None
    try:
        committed = read_commit(step, attempt, run_id)
    except (Corrupt, Reject) as error:
        problems.append(str(error))
    return StepRecord(
        attempt=attempt,
        folder=folder,
        seals=sound,
        announced=announced,
        committed=committed,
        problems=tuple(problems),
    )


def _read_seals(
    step: Folder,
    parse_name: Callable[[str], int | None],
    expected: tuple[Attempt, str],
    problems: list[str],
) -> dict[int, Seal]:
    seals = {}
    for name in step.names():
        rank = parse_name(name)
        if rank is None:
            continue
        try:
            data = step.read(name)
            if data is None:
                continue
            seal = decode(Seal, data, f"{step.path}/{name}")
        except (Corrupt, Reject) as error:
            problems.append(str(error))
            continue
        if (seal.rank, (seal.attempt, seal.run_id)) == (rank, expected):
            seals[rank] = seal
        else:
            problems.append(f"{step.path}/{name}: belongs to another rank, attempt or run")
    return seals


def find_wrong_size(step: Folder, entries: tuple[FileEntry, ...]) -> str | None:
    """A sentence on the first file that is missing or not of its declared size; None if all are."""
    for entry in entries:
        try:
            found = step.size(entry.name)
        except Corrupt as error:
            return str(error)
        if found != entry.size:
            what = "missing" if found is None else f"{found} bytes"
            return f"{entry.name}: {what}, declared {entry.size}"
    return None


def read_commit(step: Folder, attempt: Attempt, run_id: str) -> CommittedStep | None:
    """The commit of a step, checked against manifest and file sizes; None where there is no COMMIT.

    Raises:
        Corrupt: COMMIT is there and does not match, or a file is missing or of another size.
        Reject: a newer release wrote it.
    """
    data = step.read(COMMIT)
    if data is None:
        return None
    commit = decode(Commit, data, f"{step.path}/{COMMIT}")
    text = step.read(MANIFEST)
    if text is None or sha256_hex(text) != commit.manifest_sha256:
        raise Corrupt(f"{step.path}/{MANIFEST}: does not match {COMMIT}")
    manifest = decode(Manifest, text, f"{step.path}/{MANIFEST}")
    if (manifest.attempt, manifest.run_id) != (attempt, run_id):
        raise Corrupt(f"{step.path}/{MANIFEST}: belongs to another attempt or run")
    bad = find_wrong_size(step, manifest.files)
    if bad is not None:
        raise Corrupt(f"{step.path}: {bad}")
    return CommittedStep(manifest=manifest, commit=commit)


def confirm_commit(step: Folder, attempt: Attempt, run_id: str) -> CommittedStep | None:
    """As `read_commit`, made durable first: what everyone calls who acts on a COMMIT.

    A COMMIT that was only seen may vanish in a power cut; after an fsync of its folder it stays.
    """
    step.sync()
    return read_commit(step, attempt, run_id)


def committable_manifest(step: Folder, attempt: Attempt, run_id: str) -> Manifest | None:
    """The manifest that a committer would write now; None while a receipt or file is missing."""
    record = scan_step(step, attempt, step.path, run_id)
    if not record.seals or set(record.seals) != set(
        range(next(iter(record.seals.values())).world_size)
    ):
        return None
    manifest = build_manifest(record.seals)
    files = tuple(entry for entry in manifest.files if entry.name != METADATA)
    return manifest if find_wrong_size(step, files) is None else None


def verify_file(step: Folder, entry: FileEntry) -> None:
    """Reads one file and compares size and digests.

    Raises:
        Corrupt: names the file and its first bad block.
        OSError: it cannot be read.
    """
    fd = step.open_file(entry.name)
    hasher = ContentHasher(entry.block_size)
    with os.fdopen(fd, "rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            hasher.update(data)
    found = hasher.finish()
    if found.size != entry.size:
        raise Corrupt(f"{step.path}/{entry.name}: {found.size} bytes, declared {entry.size}")
    for index, (got, want) in enumerate(zip(found.blocks, entry.blocks, strict=True)):
        if got != want:
            raise Corrupt(
                f"{step.path}/{entry.name}: block {index} of {len(entry.blocks)} is damaged"
            )
