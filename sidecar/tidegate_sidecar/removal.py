"""Takes steps out of sight and out of existence, and holds them: `.trash`. I/O, on either tier.

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
from tidegate_contract.identity import Pin
from tidegate_contract.layout import (
    COMMIT,
    MANIFEST,
    METADATA,
    METADATA_REMOTE,
    TRASH,
    Attempt,
    emptied_folder,
    is_temp_file,
    parse_announced_file,
    parse_data_file,
    parse_seal_file,
    step_folder,
)
from tidegate_contract.publish import remove_pin, write_pin
from tidegate_contract.run_documents import read_document, scan_pins
from tidegate_contract.scan import confirm_commit
from tidegate_contract.seal import Manifest, Seal

_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_LOOKS = 3


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


def pin_step(run: Folder, pin: Pin) -> int | None:
    """Pins a commit and sees to it that it is there.

    Retention reads the pins before it moves a step and again before it empties one; here the pin
    is written first and the step looked at afterwards, so one of the two sees the other.

    Returns:
        How often the step had to be moved back from `.trash`; None if it was removed meanwhile:
        it is not pinned then.

    Raises:
        OSError: the tier fails; the step may or may not be pinned.
    """
    write_pin(run, pin)
    for looks in range(_LOOKS):
        if is_durable(run, pin.attempt, pin.run_id):
            return looks
        if not lies_in_trash(run, step_folder(pin.attempt)):
            break
        restore_step(run, pin.attempt)
    remove_pin(run, pin.attempt)
    return None


def lies_in_trash(run: Folder, name: str) -> bool:
    """Whether `.trash` holds a folder of this name now, whatever is left in it."""
    try:
        with run.child(TRASH) as trash, trash.child(name):
            return True
    except FileNotFoundError:
        return False


def empty_step(run: Folder, attempt: Attempt, tick: Callable[[], None] = lambda: None) -> bool:
    """Removes a step that lies in `.trash`; a second call finishes what a crash left.

    The step first takes a name that is none to readers, and then the pins are read once more:
    whoever pinned it before keeps it, whoever comes later finds it gone. COMMIT goes first, then
    data, then the documents that name the data: whatever is left after a crash counts for nothing
    and still says what it is. A folder with names that the format does not know is left with those.
    One with a document that cannot be read stays whole, and in its place.

    Args:
        run: the run's folder.
        attempt: which step.
        tick: called after each file.

    Returns:
        False if there was nothing to remove.

    Raises:
        OSError: it cannot be read or written.
    """
    with run.ensure_child(TRASH) as trash:
        is_any = _empty(run, trash, attempt, tick)
        if _take_away(run, trash, attempt):
            is_any |= _empty(run, trash, attempt, tick)
    return is_any


def _take_away(run: Folder, trash: Folder, attempt: Attempt) -> bool:
    """Hides a step of `.trash` from readers; False if it is gone, pinned, or its place is taken."""
    name = step_folder(attempt)
    try:
        with trash.child(name) as step:
            _has_commit(step), _removable(step)  # raises what keeps it where it is
        if attempt in scan_pins(run):
            return False
        trash.rename(name, emptied_folder(attempt))
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in _OCCUPIED:
            return False
        raise
    return True


def _empty(run: Folder, trash: Folder, attempt: Attempt, tick: Callable[[], None]) -> bool:
    name = emptied_folder(attempt)
    try:
        step = trash.child(name)
    except FileNotFoundError:
        return False
    with step:
        has_commit, files = _has_commit(step), _removable(step)
        if has_commit and attempt in scan_pins(run):
            _bring_back(trash, attempt)
            return False
        if has_commit:
            step.remove(COMMIT)
        step.sync()
        for file in files:
            step.remove(file)
            tick()
    is_gone = _remove_empty(trash, name)
    trash.sync()
    return is_gone or has_commit or bool(files)


def _bring_back(trash: Folder, attempt: Attempt) -> None:
    try:
        trash.rename(emptied_folder(attempt), step_folder(attempt))
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
    trash.sync()


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
