"""The ground's cgroups, version 1 and 2: made, listed, emptied and removed.

Every process of a ground is in its cgroup, so taking the ground down needs no list of processes.
A group is named by its path below the root of each hierarchy.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from tidegate_ground import processes
from tidegate_ground.errors import GroundError
from tidegate_ground.waiting import wait_until

CGROUP_ROOT = Path("/sys/fs/cgroup")
NEEDED_CONTROLLERS = {"cpu", "cpuset", "memory", "pids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """One mounted cgroup hierarchy.

    Attributes:
        path: where it is mounted.
        version: 1 or 2.
        controllers: of version 1, what it is mounted with (`cpu`, `name=systemd`); of version 2
            nothing, as the files there say it.
    """

    path: Path
    version: int
    controllers: tuple[str, ...]

    @property
    def needs_delegation(self) -> bool:
        """Whether children get controllers only when their parent hands them down.

        True of version 2 alone, and only where it stands alone: beside version 1 it has none that
        pods need, and what its root hands down is the machine's own affair.
        """
        return self.version == 2 and self.path == CGROUP_ROOT


def parse_hierarchies(mounts: str, controllers: str) -> tuple[Hierarchy, ...]:
    """Reads the hierarchies out of the text of /proc/self/mounts and /proc/cgroups."""
    known = {line.split()[0] for line in controllers.splitlines() if not line.startswith("#")}
    found = []
    for line in mounts.splitlines():
        _, path, kind, options, *_ = line.split()
        if kind == "cgroup":
            names = [o for o in options.split(",") if o in known or o.startswith("name=")]
            found.append(Hierarchy(path=Path(path), version=1, controllers=tuple(names)))
        elif kind == "cgroup2":
            found.append(Hierarchy(path=Path(path), version=2, controllers=()))
    return tuple(found)


def observe_hierarchies() -> tuple[Hierarchy, ...]:
    """Returns the hierarchies mounted in this mount namespace."""
    return parse_hierarchies(
        Path("/proc/self/mounts").read_text(), Path("/proc/cgroups").read_text()
    )


def require_controllers() -> None:
    """Raises a GroundError that names the controllers this machine does not offer."""
    offered: set[str] = set()
    for hierarchy in observe_hierarchies():
        offered |= set(hierarchy.controllers)
        if hierarchy.version == 2:
            offered |= set((hierarchy.path / "cgroup.controllers").read_text().split())
    if missing := NEEDED_CONTROLLERS - offered:
        raise GroundError(
            f"This machine offers no cgroup controller {', '.join(sorted(missing))}; kubelets "
            f"need {', '.join(sorted(NEEDED_CONTROLLERS))}, in cgroup version 1 or 2."
        )


def make(group: str) -> None:
    """Makes the group in every hierarchy, ready to take processes.

    Raises:
        GroundError: this machine does not let us.
    """
    for hierarchy in observe_hierarchies():
        path = hierarchy.path
        for part in group.split("/"):
            parent, path = path, path / part
            try:
                if hierarchy.needs_delegation:
                    delegate_controllers(parent)
                path.mkdir(exist_ok=True)
            except OSError as error:
                raise GroundError(
                    f"The ground cannot make the cgroup {path} ({error.strerror}): it needs "
                    f"{hierarchy.path} writable and, in version 2, a root group of its own."
                ) from error
            if "cpuset" in hierarchy.controllers:
                _fill_cpuset(parent, path)


def delegate_controllers(parent: Path) -> None:
    """Gives the children of a version 2 group all controllers the group has itself."""
    for controller in (parent / "cgroup.controllers").read_text().split():
        (parent / "cgroup.subtree_control").write_text(f"+{controller}")


def _fill_cpuset(parent: Path, path: Path) -> None:
    # A new version 1 cpuset is empty, and takes no process until it is filled.
    for file in ("cpuset.cpus", "cpuset.mems"):
        (path / file).write_text((parent / file).read_text())
    (path / "cgroup.clone_children").write_text("1")


def join_files(group: str) -> list[Path]:
    """Returns the files that take a process into the group when its pid is written to each."""
    return [h.path / group / "cgroup.procs" for h in observe_hierarchies()]


def observe_pids(group: str) -> set[int]:
    """Returns the pids in the group and below it, in any hierarchy."""
    pids: set[int] = set()
    for hierarchy in observe_hierarchies():
        for folder, _, files in os.walk(hierarchy.path / group):  # passes over what goes meanwhile
            if "cgroup.procs" not in files:
                continue
            try:
                pids |= {int(pid) for pid in Path(folder, "cgroup.procs").read_text().split()}
            except OSError:  # the group went away while it was read
                continue
    return pids


def end_all(group: str, seconds: float) -> None:
    """Ends every process in the group and below it with SIGKILL, and waits until they are gone.

    Raises:
        DeadlineExceeded: some were still there after `seconds`.
    """

    def none_left() -> bool:
        left = {pid: processes.observe(pid) for pid in observe_pids(group)}
        for pid, record in left.items():
            # Looked up again: between the two looks the pid could have gone to a stranger.
            if record and pid in observe_pids(group):
                processes.send(record, signal.SIGKILL)
        assert not left, f"pids {sorted(left)} in {group}"
        return True

    wait_until(f"the end of all processes in cgroup {group}", none_left, seconds)


def remove(group: str, seconds: float = 10) -> None:
    """Removes the empty group and those below it from every hierarchy.

    Raises:
        DeadlineExceeded: the kernel still held one after `seconds`.
    """

    def removed() -> bool:
        for hierarchy in observe_hierarchies():
            for folder, _, _ in os.walk(hierarchy.path / group, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError as error:  # busy for a moment after its last process ended
                    raise AssertionError(f"{folder}: {error.strerror}") from error
        return True

    wait_until(f"the removal of cgroup {group}", removed, seconds)
