"""Takes steps out of sight and out of existence: `.trash`. I/O, on either tier.

A step is renamed into `.trash` before anything in it is unlinked, so that no reader ever sees half
of it under its name. Only names that the format knows are unlinked. Called by whoever applies a
retention plan, and by people; several at once may work on one step.
"""

import errno
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import ENTRY_ERRORS, Folder
from tidegate_contract.layout import (
    COMMIT,
    MANIFEST,
    METADATA,
    METADATA_REMOTE,
    TRASH,
    Attempt,
    hidden_folder,
    is_temp_file,
    parse_announced_file,
    parse_data_file,
    parse_hidden_folder,
    parse_removed_folder,
    parse_seal_file,
    removed_folder,
    step_folder,
)
from tidegate_contract.run_documents import read_document, scan_pins
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


def lies_in_trash(run: Folder, attempt: Attempt) -> bool:
    """Whether `.trash` holds a folder of the attempt now, whatever is left in it."""
    try:
        with run.child(TRASH) as trash, trash.child(step_folder(attempt)):
            return True
    except FileNotFoundError:
        return False


def empty_step(run: Folder, attempt: Attempt, tick: Callable[[], None] = lambda: None) -> bool:
    """Removes a step that lies in `.trash`; another call finishes what a crash left.

    The step first takes a name that is none to readers, and then the pins are read once more: one
    that was pinned before goes back, any other takes a second name that nothing brings back. Only
    there anything is unlinked, so that no slow caller works in a folder that another one gave back.

    COMMIT goes first, then data, then the documents that name the data. A folder with names that
    the format does not know is left with those. One with a document that cannot be read stays
    whole, and in its place.

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
        _give_back(trash, attempt)
        token = _hide(run, trash, attempt)
        if token is not None:
            _judge(run, trash, attempt, token)
        names = [removed_folder(attempt, t) for t in _tokens(trash, parse_removed_folder, attempt)]
        return any([_unlink(trash, name, tick) for name in names])


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What removals that were cut off left in `.trash`.

    Attributes:
        hidden: steps that `give_back_hidden` would bring back.
        half_emptied: steps whose removal can be finished.
    """

    hidden: tuple[Attempt, ...] = ()
    half_emptied: tuple[Attempt, ...] = ()


def find_leftovers(run: Folder) -> Leftovers:
    """Both kinds, by one look.

    Raises:
        OSError: `.trash` cannot be read.
    """
    try:
        trash = run.child(TRASH)
    except FileNotFoundError:
        return Leftovers()
    with trash:
        names = trash.names()
        hidden = {found[0] for name in names if (found := parse_hidden_folder(name))}
        begun = {name: found[0] for name in names if (found := parse_removed_folder(name))}
        half = {attempt for name, attempt in begun.items() if _has_more(trash, name)}
    return Leftovers(hidden=tuple(sorted(hidden)), half_emptied=tuple(sorted(half)))


def give_back_hidden(run: Folder) -> None:
    """Brings steps back into `.trash` that somebody hid and did not judge, as it died.

    Meanwhile more may have come to speak for them than a pin. A living caller that has just hidden
    one finds it gone, and its step in `.trash`.
    """
    try:
        trash = run.child(TRASH)
    except FileNotFoundError:
        return
    with trash:
        for name in trash.names():
            found = parse_hidden_folder(name)
            if found is not None:
                _rename(trash, name, step_folder(found[0]))


def find_remains(run: Folder, attempt: Attempt) -> str | None:
    """Name inside `.trash` of a folder of the attempt that holds what the format does not know."""
    with run.ensure_child(TRASH) as trash:
        tokens = _tokens(trash, parse_removed_folder, attempt)
        return removed_folder(attempt, tokens[0]) if tokens else None


def _tokens(
    trash: Folder, parse: Callable[[str], tuple[Attempt, str] | None], attempt: Attempt
) -> list[str]:
    found = (parse(name) for name in trash.names())
    return [token for pair in found if pair and pair[0] == attempt for token in pair[1:]]


def _has_more(trash: Folder, name: str) -> bool:
    """Something in it can be removed, or the folder itself."""
    try:
        with trash.child(name) as step:
            names = step.names()
            return not names or COMMIT in names or bool(_removable(step))
    except OSError as error:
        if error.errno not in ENTRY_ERRORS | {errno.ENOENT}:
            raise
        return False


def _give_back(trash: Folder, attempt: Attempt) -> None:
    for token in _tokens(trash, parse_hidden_folder, attempt):
        _rename(trash, hidden_folder(attempt, token), step_folder(attempt))


def _hide(run: Folder, trash: Folder, attempt: Attempt) -> str | None:
    """Takes a step's name away; gives the token of its hidden one."""
    name, token = step_folder(attempt), secrets.token_hex(8)
    try:
        with trash.child(name) as step:
            _has_commit(step), _removable(step)  # raises what keeps it where it is
    except FileNotFoundError:
        return None
    is_hidden = attempt not in scan_pins(run) and _rename(
        trash, name, hidden_folder(attempt, token)
    )
    return token if is_hidden else None


def _judge(run: Folder, trash: Folder, attempt: Attempt, token: str) -> None:
    """Of two callers that judge at once, one's rename finds the folder gone."""
    is_pinned = attempt in scan_pins(run)
    name = step_folder(attempt) if is_pinned else removed_folder(attempt, token)
    _rename(trash, hidden_folder(attempt, token), name)


def _rename(trash: Folder, name: str, other: str) -> bool:
    """False if it is gone, or the other name is taken."""
    try:
        trash.rename(name, other)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        return False
    trash.sync()
    return True


def _unlink(trash: Folder, name: str, tick: Callable[[], None]) -> bool:
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
