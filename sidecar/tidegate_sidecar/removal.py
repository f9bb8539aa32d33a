"""Takes steps out of sight and out of existence: `.trash` and quarantine. I/O, on either tier.

A step is renamed into `.trash` before anything in it is unlinked, so that no reader ever sees half
of it under its name. Only names that the format knows are unlinked. Called by whoever applies a
retention plan; one caller per tier and folder at a time.
"""

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress

from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import (
    COMMIT,
    MANIFEST,
    METADATA,
    METADATA_REMOTE,
    QUARANTINE,
    TRASH,
    Attempt,
    is_temp_file,
    parse_announced_file,
    parse_data_file,
    parse_seal_file,
    quarantined_file,
    step_folder,
)
from tidegate_contract.run_documents import read_document
from tidegate_contract.scan import confirm_commit
from tidegate_contract.seal import Manifest, Seal

_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST})


def is_durable(run: Folder, attempt: Attempt, run_id: str) -> bool:
    """Whether the attempt's commit holds outside `.trash`, made durable by the asking.

    Whoever removes anything because of a commit asks first.
    """
    try:
        with run.child(step_folder(attempt)) as step:
            return confirm_commit(step, attempt, run_id) is not None
    except (FileNotFoundError, Corrupt, Reject):
        return False


def trash_step(run: Folder, attempt: Attempt) -> bool:
    """Moves a step into `.trash`.

    Its grace begins by a touch before the move: one that a crash cut off starts nothing early.

    Returns:
        False if it was gone, or an earlier one of that name still lies there.
    """
    name = step_folder(attempt)
    with run.ensure_child(TRASH) as trash:
        try:
            os.utime(name, dir_fd=run.fd, follow_symlinks=False)
            run.rename(name, name, trash)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in _OCCUPIED:
                return False
            raise
        trash.sync()
        run.sync()
    return True


def restore_step(run: Folder, attempt: Attempt) -> None:
    """Moves a step from `.trash` back to its place; what is gone, or is back, stays so.

    So does one whose place is taken by an attempt to copy it anew.
    """
    name = step_folder(attempt)
    with run.ensure_child(TRASH) as trash:
        try:
            trash.rename(name, name, run)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in _OCCUPIED:
                return
            raise
        run.sync()
        trash.sync()


def empty_step(run: Folder, attempt: Attempt, tick: Callable[[], None] = lambda: None) -> bool:
    """Removes a step that lies in `.trash`; a second call finishes what a crash left.

    COMMIT goes first, then data, then the documents that name the data: whatever is left after a
    crash counts for nothing and still says what it is. A folder with names that the format does not
    know is left with those. One with a document that cannot be read stays whole.

    Args:
        run: the run's folder.
        attempt: which step.
        tick: called after each file.

    Returns:
        False if there was nothing to remove.

    Raises:
        OSError: it cannot be read or written.
    """
    name = step_folder(attempt)
    with run.ensure_child(TRASH) as trash:
        try:
            step = trash.child(name)
        except FileNotFoundError:
            return False
        with step:
            has_commit, files = _has_commit(step), _removable(step)
            if has_commit:
                step.remove(COMMIT)
            step.sync()
            for file in files:
                step.remove(file)
                tick()
        is_gone = _remove_empty(trash, name)
        trash.sync()
    return is_gone or has_commit or bool(files)


def _has_commit(step: Folder) -> bool:
    """Reads it: one that cannot be read may be what makes this the newest step."""
    if not _is_file(step, COMMIT):
        return False
    with suppress(Corrupt):
        step.read(COMMIT)
    return True


def _remove_empty(trash: Folder, name: str) -> bool:
    try:
        os.rmdir(name, dir_fd=trash.fd)
    except OSError as error:
        if error.errno not in _OCCUPIED | {errno.ENOENT}:
            raise
        return False
    return True


def do_each(removals: Iterable[Callable[[], object]]) -> None:
    """Does each, whatever becomes of the others.

    Raises:
        OSError: the first that one of them ended with.
    """
    failed: list[OSError] = []
    for remove in removals:
        try:
            remove()
        except OSError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _removable(step: Folder) -> list[str]:
    names = [name for name in step.names() if _is_file(step, name)]
    documents = [name for name in names if _is_document(name)]
    declared = _declared(step, documents)
    data = [
        name
        for name in names
        if name in declared
        or parse_data_file(name) is not None
        or is_temp_file(name)
        or name in (METADATA, METADATA_REMOTE)
    ]
    return [*data, *documents]


def _is_file(step: Folder, name: str) -> bool:
    try:
        return step.size(name) is not None
    except Corrupt:
        return False  # a link or a folder, whatever it is called, is nothing of ours


def _is_document(name: str) -> bool:
    return (
        name == MANIFEST
        or parse_seal_file(name) is not None
        or parse_announced_file(name) is not None
    )


def _declared(step: Folder, documents: list[str]) -> set[str]:
    names = set()
    for name in documents:
        cls: type[Manifest] | type[Seal] = Manifest if name == MANIFEST else Seal
        try:
            found = read_document(step, cls, name)
        except (Corrupt, Reject):
            continue  # names of data files of our own are known by their form
        names |= {entry.name for entry in found.files} if found is not None else set()
    return names


def quarantine_file(run: Folder, attempt: Attempt, name: str) -> None:
    """Moves one damaged file aside, for people; its step is incomplete from then on.

    A step or file that is gone stays gone.
    """
    try:
        step = run.child(step_folder(attempt))
    except FileNotFoundError:
        return
    with step, run.ensure_child(QUARANTINE) as quarantine:
        if step.size(name) is None:
            return
        step.rename(name, quarantined_file(attempt, name), quarantine)
        quarantine.sync()
        step.sync()
