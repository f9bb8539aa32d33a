"""Whether two folders can be the two tiers of a run, before anything is written. Reads only.

Called by trainers when they start and by the command. Swapped, the node's retention would remove
the durable steps; as one folder, "durable" would mean this node's disk.
"""

import os
from pathlib import Path

from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import (
    COMMIT,
    LINEAGES,
    ROOT_ID,
    parse_announced_file,
    parse_state_file,
    parse_step_folder,
)


def lies_inside(path: Path, other: Path) -> bool:
    """Whether `path`, or what is there of it, is `other` or lies below it, links resolved."""
    real = Path(os.path.realpath(path))
    return any(_is_same(place, other) for place in (real, *real.parents))


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(os.stat(one), os.stat(other))
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_apart(local: Path, remote: Path, names: tuple[str, str] = ("local", "remote")) -> None:
    """Refuses two tiers that are one folder.

    Args:
        local: one of them.
        remote: the other one.
        names: what the caller calls the two.

    Raises:
        Reject: they are the same folder, or one lies inside the other.
    """
    near, far = names
    if _is_same(local, remote):
        raise Reject(f"{near} and {far} are the same folder: {local}")
    if lies_inside(remote, local):
        raise Reject(f"{far} lies inside {near}: {remote}")
    if lies_inside(local, remote):
        raise Reject(f"{near} lies inside {far}: {local}")


def check_is_local(run: Folder, names: tuple[str, str] = ("local", "remote")) -> None:
    """Refuses a folder that only a remote tier can hold.

    A trainer without a remote tier claims its lineages on the local one, beside its own documents.

    Args:
        run: the run's folder.
        names: what the caller calls the two tiers.

    Raises:
        Reject: the folder holds announcements, a COMMIT, or lineages that no trainer left there.
    """
    inside = run.names()
    has_trainer = ROOT_ID in inside or any(parse_state_file(name) is not None for name in inside)
    found = next((found for name in inside if (found := _find_remote(run, name))), None)
    if found is None and LINEAGES in inside and not has_trainer:
        found = LINEAGES
    if found is not None:
        raise Reject(
            f"{names[0]} {run.path}: {found} belongs to a remote tier: are {names[0]} and "
            f"{names[1]} swapped?"
        )


def _find_remote(run: Folder, name: str) -> str | None:
    if parse_step_folder(name) is None:
        return None
    try:
        with run.child(name) as step:
            inside = step.names()
    except (FileNotFoundError, NotADirectoryError):
        return None
    marks = (n for n in inside if n == COMMIT or parse_announced_file(n) is not None)
    return next((f"{name}/{mark}" for mark in marks), None)
