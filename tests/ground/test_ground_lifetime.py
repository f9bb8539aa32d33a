"""Grounds beside each other, their end, and the end of those that nobody owns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tidegate_ground import cgroups, disks, paths, processes
from tidegate_ground.errors import GroundError
from tidegate_ground.ground import Ground, take_down
from tidegate_ground.options import GroundOptions
from tidegate_ground.waiting import wait_until

pytestmark = pytest.mark.ground
SMALL = GroundOptions(nodes=1, nvme_bytes=1 << 28)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one ground has on this machine; all empty when there is none."""

    processes: frozenset[str]
    network_namespaces: frozenset[str]
    cgroups: frozenset[str]
    loop_files: frozenset[str]
    mounts: frozenset[str]
    has_files: bool


NOTHING = Footprint(
    processes=frozenset(),
    network_namespaces=frozenset(),
    cgroups=frozenset(),
    loop_files=frozenset(),
    mounts=frozenset(),
    has_files=False,
)


def observe_namespaces() -> dict[str, str]:
    """Pid to network namespace of each process of the machine."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found[pid] = os.readlink(f"/proc/{pid}/ns/net")
        except OSError:  # it ended while we looked
            continue
    return found


def in_group(pid: str, group: str) -> bool:
    try:
        return f"/{group}" in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False


def observe_footprint(name: str, known: frozenset[str] = frozenset()) -> Footprint:
    """Looks at the machine itself, not at what the ground says; `known` are its namespaces."""
    ground_paths = paths.ground_paths(name)
    group, state = ground_paths.cgroup, str(ground_paths.state)
    namespaces = observe_namespaces()
    own = {pid for pid in namespaces if in_group(pid, group)}
    host = os.readlink("/proc/self/ns/net")
    inside = {namespaces[pid] for pid in own} - {host}
    # Numbers are given again: another ground may have them by now, nobody else.
    elsewhere = {ns for pid, ns in namespaces.items() if not in_group(pid, "tidegate-ground-")}
    groups = [h.path / group for h in cgroups.observe_hierarchies()]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return Footprint(
        processes=frozenset(own),
        network_namespaces=frozenset(inside | (known & elsewhere)),
        cgroups=frozenset(str(path) for path in groups if path.exists()),
        loop_files=frozenset(f for f in disks.observe_loop_files() if f.startswith(state + "/")),
        mounts=frozenset(line for line in mounts if state in line),
        has_files=ground_paths.state.exists(),
    )


@contextmanager
def a_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


def break_off_up(name: str) -> None:
    """Kills a process in the middle of `up`, when its API server runs already."""
    command = [sys.executable, "-m", "tidegate_ground", "up", "--nodes=1", "--name", name]
    root = str(Path(__file__).parent)
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root}) as starter:
        record = paths.ground_paths(name).processes / "kube-apiserver.json"
        wait_until("the API server's start", record.exists, 30)
        starter.send_signal(signal.SIGKILL)


def test_grounds_nobody_owns_are_removed_by_the_next_and_leave_nothing(ground: Ground) -> None:
    me = processes.require(os.getpid())
    orphan, broken, next_one = f"orphan-{me.pid}", f"broken-{me.pid}", f"next-{me.pid}"
    mounts_before = Path("/proc/self/mounts").read_text()
    with a_process() as owner:
        second = Ground.up(orphan, SMALL, owner=processes.require(owner.pid))
        second.kubectl("create", "namespace", "only-here")
        assert ground.kubectl("get", "namespace", "only-here", check=False).returncode
        assert len(second.get("nodes")["items"]) == 1
        with pytest.raises(GroundError, match="is there already"):
            Ground.up(orphan, SMALL)
    before = {orphan: observe_footprint(orphan)}
    assert before[orphan].processes and len(before[orphan].network_namespaces) == 2
    assert before[orphan].cgroups and before[orphan].loop_files
    break_off_up(broken)
    before[broken] = observe_footprint(broken)
    assert before[broken].processes
    reports: list[str] = []
    third = Ground.up(next_one, SMALL, owner=me, report=reports.append)
    for name, footprint in before.items():
        assert observe_footprint(name, footprint.network_namespaces) == NOTHING
    # The other one was removed by the `up` that broke off.
    assert any(f"Removed the ground {broken}" in sentence for sentence in reports)
    own = observe_footprint(next_one)
    third.down()
    assert observe_footprint(next_one, own.network_namespaces) == NOTHING
    assert Path("/proc/self/mounts").read_text() == mounts_before
    assert all(status.is_ready for status in ground.observe_nodes().values())


def test_down_of_what_is_not_there_is_no_error() -> None:
    take_down(paths.ground_paths("never-was"))
    assert observe_footprint("never-was") == NOTHING
