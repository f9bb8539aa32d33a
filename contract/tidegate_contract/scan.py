"""The only reader of visibility: one run folder of one tier → records of what is really there.

Names, times and hints prove nothing: a step counts by its seals or its COMMIT, its files by their
declared sizes. Discovery, restore, retention and reports all ask here. Reads only; callers may be
any process that may read the folder.
"""

import errno
import os
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from tidegate_contract.digest import ContentDigest, ContentHasher, sha256_hex
from tidegate_contract.document import decode
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import (
    COMMIT,
    LINEAGES,
    MANIFEST,
    METADATA,
    TRASH,
    Attempt,
    parse_announced_file,
    parse_lineage_file,
    parse_seal_file,
    parse_step_folder,
)
from tidegate_contract.run_documents import read_document
from tidegate_contract.seal import (
    Commit,
    FileEntry,
    Manifest,
    Seal,
    build_manifest,
    covers_all_ranks,
    has_own_metadata,
)

_READ_BYTES = 4 << 20
NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Open of a folder's name that is missing, a file or a link: no step can lie behind it."""

D = TypeVar("D")
_Errors = tuple[type[OSError], ...]


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
        return covers_all_ranks(self.announced | self.seals)


def scan_steps(run: Folder, run_id: str, *, is_local: bool = False) -> list[StepRecord]:
    """Records of all step folders, `.trash` included, by step; unknown names are not touched.

    A step that is moved into `.trash` or out of it meanwhile is seen all the same: else a restore
    might see no step at all. Seals and manifests of any other run than `run_id` are refused.
    On a node (`is_local`) one bad block must not end the look: what of a step cannot be read is a
    problem of that step, and a `.trash` that cannot be read is as none.

    Raises:
        OSError: the folder cannot be listed; without `is_local`, something in it cannot be read.
    """
    spared: _Errors = (OSError,) if is_local else ()
    records = _scan_inside(run, "", run_id, spared=spared)
    try:
        trash = _find_folder(run, TRASH)
        if trash is None:
            return records
        with trash:
            records += _scan_inside(trash, f"{TRASH}/", run_id, spared=spared)
    except spared:
        return records
    known = {record.attempt for record in records}
    records += _scan_inside(run, "", run_id, known, spared)
    return sorted(records, key=lambda record: record.attempt)


def _scan_inside(
    folder: Folder,
    prefix: str,
    run_id: str,
    known: Container[Attempt] = (),
    spared: _Errors = (),
) -> list[StepRecord]:
    records = []
    for name in folder.names():
        attempt = parse_step_folder(name)
        if attempt is None or attempt in known:
            continue
        path = f"{prefix}{name}"
        try:
            step = folder.child(name)
        except FileNotFoundError:
            continue  # moved or removed since the listing
        except OSError as error:
            problem = f"{folder.path}/{name}: cannot be opened ({error.strerror})"
            records.append(StepRecord(attempt=attempt, folder=path, problems=(problem,)))
            continue
        with step:
            try:
                records.append(scan_step(step, attempt, path, run_id))
            except spared as error:
                problem = f"{step.path}: cannot be read ({error.strerror})"
                records.append(StepRecord(attempt=attempt, folder=path, problems=(problem,)))
    return records


def _find_folder(folder: Folder, name: str) -> Folder | None:
    """A folder inside this one; None for anything else that has its name.

    Raises:
        OSError: it cannot be opened: what it holds is not known.
    """
    try:
        return folder.child(name)
    except OSError as error:
        if error.errno not in NO_FOLDER:
            raise
        return None


def scan_run_ids(run: Folder) -> dict[str, str | None]:
    """Which run the documents in a run's folder name, `run.json` aside.

    Called by whoever is about to write a damaged `run.json` anew.

    Returns:
        Path of a step folder, or of a lineage claim, → run id. A step folder has that of its first
        readable document; None where it has none.

    Raises:
        OSError: a folder cannot be listed.
    """
    told = dict(_step_run_ids(run, ""))
    for name, ids in ((TRASH, _step_run_ids), (LINEAGES, _claim_run_ids)):
        inside = _find_folder(run, name)
        if inside is not None:
            with inside:
                told |= ids(inside, f"{name}/")
    return told


def _step_run_ids(folder: Folder, prefix: str) -> Iterator[tuple[str, str | None]]:
    for name in folder.names():
        if parse_step_folder(name) is None:
            continue
        try:
            with folder.child(name) as step:
                yield f"{prefix}{name}", _step_run_id(step)
        except OSError:
            yield f"{prefix}{name}", None


def _step_run_id(step: Folder) -> str | None:
    for name in [MANIFEST, *step.names()]:
        cls: type[Manifest] | type[Seal] = Manifest if name == MANIFEST else Seal
        is_seal = parse_seal_file(name) is not None or parse_announced_file(name) is not None
        found = _read_or_none(step, cls, name) if is_seal or cls is Manifest else None
        if found is not None:
            return found.run_id
    return None


def _claim_run_ids(lineages: Folder, prefix: str) -> Iterator[tuple[str, str | None]]:
    for name in lineages.names():
        claim = _read_or_none(lineages, LineageClaim, name) if parse_lineage_file(name) else None
        if claim is not None:
            yield f"{prefix}{name}", claim.run_id


def _read_or_none(folder: Folder, cls: type[D], name: str) -> D | None:
    try:
        return read_document(folder, cls, name)
    except (OSError, Corrupt, Reject):
        return None  # another document may tell


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
    announced = read_seals(step, parse_announced_file, expected, problems)
    sealed = read_seals(step, parse_seal_file, expected, problems, announced)
    sound = {}
    for rank, seal in sealed.items():
        # announcements exist on the remote tier only, and so do not the files of scope LOCAL there
        bad = find_wrong_size(step, seal.files if not announced else seal.flushed_files)
        if bad is None:
            sound[rank] = seal
        else:
            problems.append(bad)
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
        problems=tuple(dict.fromkeys(problems)),  # seals and manifest name the same files
    )


def read_seals(
    step: Folder,
    parse_name: Callable[[str], int | None],
    expected: tuple[Attempt, str],
    problems: list[str],
    known: Mapping[int, Seal] = MappingProxyType({}),
) -> dict[int, Seal]:
    """Rank → seal of all readable seals, or announcements, of one open step folder.

    Args:
        step: the open step folder.
        parse_name: which documents: `parse_seal_file` or `parse_announced_file`.
        expected: attempt and run id that they must have.
        problems: takes a sentence for each that was refused.
        known: the same ranks' equal documents, to take the place of new ones: a step of many files
            has two of each, and half a KiB for each file in either.
    """
    seals = {}
    for name in step.names():
        rank = parse_name(name)
        if rank is None:
            continue
        try:
            seal = read_document(step, Seal, name)
        except (Corrupt, Reject) as error:
            problems.append(str(error))
            continue
        if seal is None:
            continue
        if (seal.rank, (seal.attempt, seal.run_id)) == (rank, expected):
            seals[rank] = known[rank] if known.get(rank) == seal else seal
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
            missing = f"missing ({entry.size} bytes)"
            what = missing if found is None else f"{found} bytes, declared {entry.size}"
            return f"{step.path}/{entry.name}: {what}"
    return None


def read_commit(step: Folder, attempt: Attempt, run_id: str) -> CommittedStep | None:
    """The commit of a step, checked against manifest and file sizes; None where there is no COMMIT.

    Raises:
        Corrupt: COMMIT is there and does not match, or a file is missing or of another size.
        Reject: a newer release wrote it.
    """
    found = read_manifest(step, attempt, run_id)
    bad = find_wrong_size(step, found.manifest.files) if found is not None else None
    if bad is not None:
        raise Corrupt(bad)
    return found


def read_manifest(step: Folder, attempt: Attempt, run_id: str) -> CommittedStep | None:
    """COMMIT and the manifest that it marks, whatever became of the files; None without COMMIT.

    Raises:
        Corrupt: COMMIT or manifest is damaged, or they do not match.
        Reject: a newer release wrote one of them.
    """
    commit = read_document(step, Commit, COMMIT)
    if commit is None:
        return None
    text = step.read(MANIFEST)
    if text is None:
        raise Corrupt(f"{step.path}/{MANIFEST}: missing")
    if sha256_hex(text) != commit.manifest_sha256:
        raise Corrupt(f"{step.path}/{MANIFEST}: does not match {COMMIT}")
    manifest = decode(Manifest, text, f"{step.path}/{MANIFEST}")
    if (manifest.attempt, manifest.run_id) != (attempt, run_id):
        raise Corrupt(f"{step.path}/{MANIFEST}: belongs to another attempt or run")
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
    if not covers_all_ranks(record.seals):
        return None
    manifest = build_manifest(record.seals)
    made = {METADATA} if has_own_metadata(manifest) else set()
    files = tuple(entry for entry in manifest.files if entry.name not in made)
    return manifest if find_wrong_size(step, files) is None else None


def verify_file(step: Folder, entry: FileEntry, *, from_disk: bool = False) -> None:
    """Reads one file and compares size and digests; `from_disk` as in `hash_file`.

    Raises:
        Corrupt: names the file and its first bad block.
        OSError: it cannot be read.
    """
    found = hash_file(step, entry, from_disk=from_disk)
    for index, (got, want) in enumerate(zip(found.blocks, entry.blocks, strict=True)):
        if got != want:
            where = f"block {index} of {len(entry.blocks)}"
            raise Corrupt(f"{step.path}/{entry.name}: {where} is damaged")


def hash_file(
    step: Folder,
    entry: FileEntry,
    on_bytes: Callable[[int], None] = lambda _: None,
    *,
    from_disk: bool = False,
) -> ContentDigest:
    """Digests of a file of the declared size, in the blocks of its entry.

    A file that somebody lengthens meanwhile is read no further than its declared size.

    Args:
        step: the open step folder.
        entry: which file, and how long it is to be.
        on_bytes: told the bytes of each piece that was read.
        from_disk: past what the kernel keeps of an earlier reading, which may be a bad one.

    Raises:
        Corrupt: another size, or not a regular file.
        OSError: it cannot be read.
    """
    fd = step.open_file(entry.name)
    hasher = ContentHasher(entry.block_size)
    with os.fdopen(fd, "rb", buffering=0) as file:
        if from_disk:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(fd).st_size
        left = entry.size if size == entry.size else 0
        while left and (data := file.read(min(left, _READ_BYTES))):
            hasher.update(data)
            left -= len(data)
            on_bytes(len(data))
    if size != entry.size or left:
        raise Corrupt(f"{step.path}/{entry.name}: {size - left} bytes, declared {entry.size}")
    return hasher.finish()
