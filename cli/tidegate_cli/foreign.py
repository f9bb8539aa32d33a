"""Makes a sealed attempt of a folder that another framework wrote. I/O, on the local tier.

The order of writes is that of `contract.publish`: data, its fsync, its name, the folder, the seal.
Until the seal stands nothing counts. Called by `seal`.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

from tidegate_cli.terminal import naming
from tidegate_contract.digest import ContentDigest, ContentHasher
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import (
    METADATA_REMOTE,
    Attempt,
    check_file_name,
    is_step_document,
    step_folder,
    temp_file,
)
from tidegate_contract.publish import write_seal
from tidegate_contract.seal import FileEntry, SaveReason, Seal, file_entry

_READ_BYTES = 4 << 20
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealing:
    """What is declared of a foreign folder.

    Attributes:
        run_id: of the run.
        lineage: raised when training went back to an earlier step.
        attempt: step and nonce; never used before.
        tokens: consumed since the run began; 0 where nobody counts them.
        now: UTC.
        shares_files: give the files a second name instead of copying them, where that works.
    """

    run_id: str
    lineage: int
    attempt: Attempt
    tokens: int
    now: datetime
    shares_files: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stamp:
    """What changes when anybody writes a file."""

    device: int
    inode: int
    size: int
    mtime_ns: int


def list_files(source: Folder) -> dict[str, int]:
    """Name → bytes of all files of a flat folder.

    Raises:
        Reject: it is empty, or an entry is none that a step may hold; the sentence names it.
    """
    sizes: dict[str, int] = {}
    folded: dict[str, str] = {}
    for name in source.names():
        twin = folded.setdefault(name.lower(), name)
        if twin != name:
            raise Reject(
                f"{source.path}/{name}: differs from {twin} in case only; a tier may take both for "
                "one file"
            )
        sizes[name] = _check_entry(source, name)
    if not sizes:
        raise Reject(f"{source.path}: holds no files")
    return sizes


def _check_entry(source: Folder, name: str) -> int:
    path = f"{source.path}/{name}"
    with naming(source.path):
        found = os.stat(name, dir_fd=source.fd, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        raise Reject(f"{path}: a link; allowed is a flat folder of regular files")
    if stat.S_ISDIR(found.st_mode):
        raise Reject(f"{path}: a subfolder; allowed is a flat folder of regular files")
    if not stat.S_ISREG(found.st_mode):
        raise Reject(f"{path}: not a regular file; allowed is a flat folder of regular files")
    if _is_taken(name):
        raise Reject(f"{path}: a name of Tidegate's own, so this folder is sealed already")
    try:
        check_file_name(name)
    except ValueError as error:
        raise Reject(
            f"{path}: this file name is not allowed; allowed are A-Z, a-z, 0-9, '.', '_' and '-', "
            "at most 200 characters"
        ) from error
    return found.st_size


def _is_taken(name: str) -> bool:
    return is_step_document(name) or name.lower() == METADATA_REMOTE


def draw_attempt(step: int, lineage: int, known: list[tuple[Attempt, int]]) -> Attempt:
    """A new attempt that is newer than all of its step and lineage, since the nonce breaks ties.

    Args:
        step: of the attempt.
        lineage: of the attempt.
        known: attempts of the run, each with its lineage.

    Raises:
        Reject: no nonce is left above those that are taken.
    """
    taken = [int(a.nonce, 16) for a, n in known if (a.step, n) == (step, lineage)]
    first = max(taken, default=-1) + 1
    if first >= 2**64:
        raise Reject(f"step {step}: no newer attempt is left in lineage {lineage}; raise --lineage")
    return Attempt(step=step, nonce=f"{first + secrets.randbelow(2**64 - first):016x}")


def seal_folder(
    source: Folder,
    run: Folder,
    sealing: Sealing,
    on_bytes: Callable[[int], None],
    before_seal: Callable[[], None] = lambda: None,
) -> str:
    """Writes the sealed attempt.

    Args:
        source: the foreign folder; it stays as it is.
        run: the run's folder on the local tier.
        sealing: what is declared.
        on_bytes: told the bytes of each piece that was read.
        before_seal: called once nothing is left to refuse; what it raises leaves no step behind.

    Returns:
        Name of the step's folder.

    Raises:
        Reject: an entry is not allowed, or something in the folder changed meanwhile.
        OSError: a call failed; look again whether the seal stands.
    """
    names = list(list_files(source))
    before = {name: _stamp_of(source, name) for name in names}
    folder = step_folder(sealing.attempt)
    with naming(run.path), run.ensure_child(folder) as step, naming(step.path):
        try:
            entries = [_take_file(source, step, name, sealing, on_bytes) for name in names]
            _check_unchanged(source, before)
            before_seal()
        except BaseException:
            _remove_unsealed(run, step, folder, names)
            raise
        write_seal(step, _build_seal(sealing, entries))
    return folder


def _check_unchanged(source: Folder, before: dict[str, _Stamp]) -> None:
    after = {name: _stamp_of(source, name) for name in source.names()}
    changed = sorted(n for n in before | after if before.get(n) != after.get(n))
    if changed:
        raise Reject(f"{source.path}/{changed[0]}: changed while it was read; nothing is sealed")


def _remove_unsealed(run: Folder, step: Folder, folder: str, names: list[str]) -> None:
    """Only before the seal is written: from then on its files may count."""
    with suppress(OSError):  # a crash would leave them, too: without a seal they count for nothing
        for name in names:
            step.remove(name)
        os.rmdir(folder, dir_fd=run.fd)


def _build_seal(sealing: Sealing, entries: list[FileEntry]) -> Seal:
    return Seal(
        run_id=sealing.run_id,
        lineage=sealing.lineage,
        attempt=sealing.attempt,
        tokens=sealing.tokens,
        rank=0,
        world_size=1,
        sealed_at=sealing.now,
        reason=SaveReason.CALL,
        torch_version="",
        files=tuple(entries),
    )


def _stamp_of(folder: Folder, name: str) -> _Stamp:
    with naming(folder.path):
        found = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
    return _Stamp(
        device=found.st_dev,
        inode=found.st_ino,
        size=found.st_size,
        mtime_ns=found.st_mtime_ns,
    )


def _take_file(
    source: Folder, step: Folder, name: str, sealing: Sealing, on_bytes: Callable[[int], None]
) -> FileEntry:
    try:
        if sealing.shares_files:
            with _shared(source, step, name) as linked:
                if linked is not None:
                    return _seal_shared(step, name, linked, on_bytes)
        return _copy(source, step, name, on_bytes)
    except (FileNotFoundError, Corrupt) as error:
        raise Reject(
            f"{source.path}/{name}: changed while it was read; nothing is sealed"
        ) from error


@contextmanager
def _shared(source: Folder, step: Folder, name: str) -> Iterator[str | None]:
    """A second, unfinished name of the file in the step's folder; None where links do not work."""
    linked = temp_file(name, secrets.token_hex(8))
    try:
        os.link(name, linked, src_dir_fd=source.fd, dst_dir_fd=step.fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        yield None
        return
    try:
        yield linked
    finally:
        step.remove(linked)


def _seal_shared(
    step: Folder, name: str, linked: str, on_bytes: Callable[[int], None]
) -> FileEntry:
    fd = step.open_file(linked)
    try:
        content = _read(fd, lambda _: None, on_bytes)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    step.rename(linked, name)
    return file_entry(name, content)


def _copy(source: Folder, step: Folder, name: str, on_bytes: Callable[[int], None]) -> FileEntry:
    with naming(source.path):
        fd = source.open_file(name)
    try:
        with step.new_file(name) as file:
            content = _read(fd, file.write, on_bytes)
            file.publish(content.size)
    finally:
        os.close(fd)
    return file_entry(name, content)


def _read(
    fd: int, write: Callable[[bytes], None], on_bytes: Callable[[int], None]
) -> ContentDigest:
    hasher = ContentHasher()
    while data := os.read(fd, _READ_BYTES):
        hasher.update(data)
        write(data)
        on_bytes(len(data))
    return hasher.finish()
