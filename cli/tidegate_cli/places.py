"""Whether two folders and a run's name can belong together, before anything is written. Reads only.

Called by `seal` and `flush`.
"""

import os
from pathlib import Path

from tidegate_contract.errors import Reject
from tidegate_contract.layout import RUN_DOCUMENT


def split_existing(path: Path) -> tuple[Path, str]:
    """The nearest folder of an absolute path that exists, and the rest of the path."""
    root = path
    while not root.exists():
        root = root.parent
    return root, str(path.relative_to(root))


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
