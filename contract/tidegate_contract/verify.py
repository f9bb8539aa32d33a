"""Reads back everything a copy consists of and says what is not as it was declared.

`scan` judges a copy by its documents and sizes, which is what a decision needs; here every byte is
read: documents, their contradictions, and all blocks of all files. Reads only. Called by the
`tidegate` command and by tests; callers may be any process that may read the folder.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from tidegate_contract.digest import ContentDigest
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import (
    COMMIT,
    MANIFEST,
    Attempt,
    announced_file,
    parse_announced_file,
    parse_seal_file,
    seal_file,
)
from tidegate_contract.scan import hash_file, read_manifest, read_seals
from tidegate_contract.seal import FileEntry, Manifest, Seal, build_manifest


def verify_step(
    step: Folder,
    attempt: Attempt,
    run_id: str,
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
    stops_at_first: bool = False,
) -> list[str]:
    """Reads one step folder of either tier completely.

    A local copy is judged by its seals; a remote one by its receipts, and by its manifest where it
    is committed. Files of an announcement without receipt may still come and are no problem.

    Args:
        step: the open step folder.
        attempt: what its name says; documents of another attempt are refused.
        run_id: documents of another run are refused.
        on_bytes: told the bytes of each piece of a data file that was read; see `size_to_verify`.
        stops_at_first: return after the first problem.

    Returns:
        A sentence for each problem, naming the file and, within it, the damaged blocks; empty when
        everything is as it was declared. A file that cannot be read is a problem, too.

    Raises:
        OSError: the folder or one of its documents cannot be read.
    """
    found = _find_problems(step, attempt, run_id, on_bytes)
    return list(islice(found, 1) if stops_at_first else found)


def size_to_verify(step: Folder, attempt: Attempt, run_id: str) -> int:
    """Bytes of data files that `verify_step` reads when nothing is damaged: a progress' total."""
    return sum(entry.size for entry in _list_entries(_observe_step(step, attempt, run_id)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observed:
    """The documents of one step folder, and a sentence for each that was refused."""

    path: str
    names: frozenset[str]
    seals: dict[int, Seal]
    announced: dict[int, Seal]
    manifest: Manifest | None
    problems: tuple[str, ...]

    @property
    def is_remote(self) -> bool:
        """Announcements and commits exist on the remote tier only, even damaged ones."""
        return not {COMMIT, MANIFEST}.isdisjoint(self.names) or any(
            parse_announced_file(name) is not None for name in self.names
        )


def _observe_step(step: Folder, attempt: Attempt, run_id: str) -> _Observed:
    problems: list[str] = []
    expected = (attempt, run_id)
    manifest = None
    try:
        marked = read_manifest(step, attempt, run_id)
        manifest = marked.manifest if marked is not None else None
    except (Corrupt, Reject) as error:
        problems.append(str(error))
    return _Observed(
        path=step.path,
        names=frozenset(step.names()),
        seals=read_seals(step, parse_seal_file, expected, problems),
        announced=read_seals(step, parse_announced_file, expected, problems),
        manifest=manifest,
        problems=tuple(problems),
    )


def _find_problems(
    step: Folder, attempt: Attempt, run_id: str, on_bytes: Callable[[int], None]
) -> Iterator[str]:
    seen = _observe_step(step, attempt, run_id)
    yield from seen.problems
    yield from _find_contradictions(seen)
    for entry in _list_entries(seen):
        yield from _find_damage(step, entry, on_bytes)


def _find_contradictions(seen: _Observed) -> Iterator[str]:
    for rank in sorted(seen.seals.keys() & seen.announced.keys()):
        if seen.seals[rank] != seen.announced[rank]:
            yield f"{seen.path}/{announced_file(rank)}: differs from {seal_file(rank)}"
    if seen.manifest is None:
        return
    wanted = {seal_file(rank): rank for rank in range(seen.manifest.world_size)}
    missing = [name for name in wanted if name not in seen.names]
    yield from (f"{seen.path}/{name}: missing, but the step is committed" for name in missing)
    if set(wanted.values()) <= seen.seals.keys():
        yield from _compare_manifest(seen, seen.manifest)


def _compare_manifest(seen: _Observed, manifest: Manifest) -> Iterator[str]:
    try:
        is_same = build_manifest(seen.seals) == manifest
    except Corrupt as error:
        yield f"{seen.path}: {error}"
        return
    if not is_same:
        yield f"{seen.path}/{MANIFEST}: is not what the seals give"


def _list_entries(seen: _Observed) -> list[FileEntry]:
    entries = {
        entry
        for seal in seen.seals.values()
        for entry in (seal.flushed_files if seen.is_remote else seal.files)
    }
    if seen.manifest is not None:
        entries.update(seen.manifest.files)
    return sorted(entries, key=lambda entry: (entry.name, entry.digest))


def _find_damage(step: Folder, entry: FileEntry, on_bytes: Callable[[int], None]) -> Iterator[str]:
    path = f"{step.path}/{entry.name}"
    try:
        found = hash_file(step, entry, on_bytes)
    except FileNotFoundError:
        yield f"{path}: missing ({entry.size} bytes)"
    except OSError as error:
        yield f"{path}: cannot be read ({error.strerror})"
    except Corrupt as error:
        yield str(error)
    else:
        yield from (f"{path}: {what}" for what in _name_blocks(found, entry))


def _name_blocks(found: ContentDigest, entry: FileEntry) -> Iterator[str]:
    """Neighbouring blocks in one sentence, so that a lost disk does not give a million."""
    pairs = enumerate(zip(found.blocks, entry.blocks, strict=True))
    bad = [index for index, (got, want) in pairs if got != want]
    first = 0
    for last, index in enumerate(bad):
        if last + 1 < len(bad) and bad[last + 1] == index + 1:
            continue
        of = f"of {len(entry.blocks)}"
        if first == last:
            yield f"block {index} {of} is damaged"
        else:
            yield f"blocks {bad[first]} to {index} {of} are damaged"
        first = last + 1
