"""Taking grounds away: one that is not wanted any more, and those that nobody owns.

It works from the ground's name alone, so it does not matter how far `up` came.
"""

from __future__ import annotations

import shutil

from tidegate_ground import cgroups, disks, processes, record
from tidegate_ground.paths import GroundPaths
from tidegate_ground.record import Abandoned

END_SECONDS = 30


def end_processes(paths: GroundPaths) -> None:
    """Ends every process of a ground; namespaces, mounts and loop devices go with them.

    Raises:
        DeadlineExceeded: something was still there; the ground's folder stays, for another try.
    """
    cgroups.end_all(paths.cgroup, END_SECONDS)
    disks.wait_until_free(paths.state, END_SECONDS)
    cgroups.remove(paths.cgroup)


def remove(paths: GroundPaths) -> None:
    """Ends a ground and deletes its files; the caller holds the lock of all grounds.

    Raises:
        DeadlineExceeded: as `end_processes`.
    """
    end_processes(paths)
    if paths.state.exists():
        shutil.rmtree(paths.state)


def remove_abandoned(example: GroundPaths) -> dict[str, Abandoned]:
    """Removes the grounds in the same root that nobody owns any more, and says which and why.

    The caller holds the lock of all grounds, so nobody takes one down at the same time.
    """
    boot_id = record.observe_boot_id()
    removed = {}
    for state in sorted(folder for folder in example.root.iterdir() if folder.is_dir()):
        paths = GroundPaths(name=state.name, root=example.root)
        reason = record.decide_abandoned(record.load(paths), boot_id, processes.is_alive)
        if reason:
            remove(paths)
            removed[state.name] = reason
    return removed
