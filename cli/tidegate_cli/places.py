"""Whether two folders and a run's name can belong together, before anything is written. Reads only.

Called by `seal` and `flush`.
"""

import os
from pathlib import Path

from tidegate_cli.terminal import naming
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import (
    COMMIT,
    LINEAGES,
    ROOT_ID,
    RUN_DOCUMENT,
    parse_announced_file,
    parse_state_file,
    parse_step_folder,
)


def split_existing(path: Path) -> tuple[Path, str]:
    """The nearest folder of an absolute path that exists, and the rest of the path."""
    root = path
    while not root.exists():
        root = root.parent
    return root, str(path.relative_to(root))


def lies_inside(path: Path, other: Path) -> bool:
    """Whether `path`, or what is there of it, is `other` or lies below it, links resolved."""
    real = Path(os.path.realpath(path))
    return any(_is_same(place, other) for place in (real, *real.parents))


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(os.stat(one), os.stat(other))
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_apart(local: Path, remote: Path) -> None:
    """Refuses two tiers that are one folder.

    Raises:
        Reject: they are the same folder, or one lies inside the other.
    """
    if _is_same(local, remote):
        raise Reject(f"--local and --remote are the same folder: {local}")
    if lies_inside(remote, local):
        raise Reject(f"--remote lies inside --local: {remote}")
    if lies_inside(local, remote):
        raise Reject(f"--local lies inside --remote: {local}")


def check_run_path(path: Path, run: str) -> None:
    """Refuses to begin the run's folder where none can lie.

    Raises:
        Reject: the path does not end in the run's name.
    """
    if Path(os.path.abspath(path)).parts[-2:] != tuple(run.split("/")):
        raise Reject(
            f"{path} does not end in {run}: a run's folder is NAMESPACE/NAME below a tier's root"
        )


def check_remote(path: Path, run: str) -> None:
    """Refuses to make the run's folder where no remote tier is.

    Raises:
        Reject: no run lies there yet, and the path does not fit the run or its root is missing.
    """
    if os.path.lexists(path / RUN_DOCUMENT):
        return
    check_run_path(path, run)
    root = Path(os.path.abspath(path)).parents[1]
    if not root.exists():
        raise Reject(f"{root} does not exist: is the remote tier mounted?")


def check_is_local(run: Folder) -> None:
    """Refuses a folder that only a remote tier can hold.

    A trainer without a remote tier claims its lineages on the local one, beside its own documents.

    Raises:
        Reject: the folder holds announcements, a COMMIT, or lineages that no trainer left there.
    """
    names = run.names()
    has_trainer = ROOT_ID in names or any(parse_state_file(name) is not None for name in names)
    found = next((found for name in names if (found := _find_remote(run, name))), None)
    if found is None and LINEAGES in names and not has_trainer:
        found = LINEAGES
    if found is not None:
        raise Reject(
            f"--local {run.path}: {found} belongs to a remote tier: are --local and --remote "
            "swapped?"
        )


def _find_remote(run: Folder, name: str) -> str | None:
    if parse_step_folder(name) is None:
        return None
    try:
        with run.child(name) as step, naming(step.path):
            inside = step.names()
    except (FileNotFoundError, NotADirectoryError):
        return None
    marks = (n for n in inside if n == COMMIT or parse_announced_file(n) is not None)
    return next((f"{name}/{mark}" for mark in marks), None)
