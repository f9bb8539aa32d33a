"""Pid 1 of a node: makes the node's view of the machine, runs its services, reaps its orphans.

Run by `node.Node` as `python -m tidegate_ground.node_init SPEC_FILE`, already in the node's
cgroup. It prints the pid of the node's pid 1 and ends; that one waits until its standard input is
closed, which says that its network is there. When it ends the kernel ends everything in the node.

Everything is imported before the first mount: what lies under /tmp, /var or /mnt on the host, be
it this code, is not there afterwards.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tidegate_ground import cgroups, commands, images, linux
from tidegate_ground.cgroups import Hierarchy
from tidegate_ground.linux import MountFlag, Namespace
from tidegate_ground.node_spec import NodeSpec, build_services, node_spec_from_json
from tidegate_ground.options import NVME, PFS
from tidegate_ground.paths import HIDDEN_IN_NODES
from tidegate_ground.waiting import wait_until

NODE_NAMESPACES = (
    Namespace.MOUNT
    | Namespace.CGROUP
    | Namespace.UTS
    | Namespace.IPC
    | Namespace.PID
    | Namespace.NETWORK
)
VAR_FOLDERS = ("lib/containerd", "lib/kubelet", "lib/cni", "log/pods", "log/containers", "tmp")
# The kubelet writes these; the host keeps its own values.
KERNEL_KNOBS = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")
RESTART_SECONDS = 1


def main() -> None:
    """Makes the namespaces and leaves the node's pid 1 in them."""
    spec = node_spec_from_json(json.loads(Path(sys.argv[1]).read_text()))
    linux.unshare(NODE_NAMESPACES)
    pid = os.fork()
    if pid:
        sys.stdout.write(f"{pid}\n")
        return
    log = os.open(spec.log("init"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdin.read()
    become_node(spec)
    services = Services(spec)
    services.launch("containerd")
    wait_until("containerd", lambda: commands.run("ctr", "version").stdout, 60)
    images.load(spec.archives, ["ctr"], Path("/"))
    services.launch("kube-proxy")
    services.launch("kubelet")
    spec.started.touch()
    services.keep()


def become_node(spec: NodeSpec) -> None:
    """Turns the copy of the host's mounts into what a machine of its own would show."""
    linux.mount("none", "/", flags=MountFlag.RECURSIVE | MountFlag.PRIVATE)
    hierarchies = cgroups.observe_hierarchies()
    # Held by handle: the sources may lie where the next mounts hide them.
    sources = [os.open(mount.source, os.O_PATH) for mount in spec.mounts]
    mountinfo = Path("/proc/self/mountinfo").read_text()
    for point in decide_detached(mountinfo, [mount.source for mount in spec.mounts]):
        linux.detach(point)
    linux.mount("proc", "/proc", "proc")
    mount_disks(spec)
    mount_cgroups(hierarchies)
    mount_identity(spec)
    for handle, mount in zip(sources, spec.mounts, strict=True):
        bind(f"/proc/self/fd/{handle}", Path(mount.target))
        read_only = MountFlag.REMOUNT | MountFlag.BIND | MountFlag.READ_ONLY
        linux.mount("none", mount.target, flags=read_only)
        os.close(handle)
    linux.mount("tmp", "/tmp", "tmpfs", options="mode=1777")
    # Last, so that all of the above is shared with pods that ask for mount propagation.
    linux.mount("none", "/", flags=MountFlag.RECURSIVE | MountFlag.SHARED)
    socket.sethostname(spec.name)


def decide_detached(mountinfo: str, needed: Sequence[Path]) -> list[Path]:
    """Returns the host's mounts that the node will hide, but for those it still needs.

    A copy of them in the node would keep them busy for as long as the node runs. Each is detached
    with all below it, and those below are left out.

    Args:
        mountinfo: the text of /proc/self/mountinfo.
        needed: folders that are to be shown elsewhere in the node.
    """
    detached: list[Path] = []
    for line in mountinfo.splitlines():
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]))
        is_hidden = any(
            point.is_relative_to(hidden) and point != Path(hidden) for hidden in HIDDEN_IN_NODES
        )
        is_gone = any(point.is_relative_to(other) for other in detached)
        is_needed = any(source.is_relative_to(point) for source in needed)
        if is_hidden and not is_gone and not is_needed:
            detached.append(point)
    return detached


def bind(source: str | Path, target: Path) -> None:
    """Shows the folder `source` at `target`, too."""
    target.mkdir(parents=True, exist_ok=True)
    linux.mount(source, target, flags=MountFlag.BIND)


def mount_disks(spec: NodeSpec) -> None:
    """Mounts /run, /var and the two folders of data."""
    linux.mount("run", "/run", "tmpfs", options="mode=755")
    linux.mount("mnt", "/mnt", "tmpfs", options="mode=755")
    for folder in ("/run/lock", "/run/netns", NVME):
        os.makedirs(folder)
    # With `loop` the kernel frees the device together with the mount.
    commands.run("mount", "-o", "loop", spec.var_disk, "/var")
    commands.run("mount", "-o", "loop", spec.nvme_disk, NVME)
    bind(spec.paths.pfs, Path(PFS))
    for folder in VAR_FOLDERS:
        os.makedirs(f"/var/{folder}", exist_ok=True)
    if not os.path.lexists("/var/run"):
        os.symlink("/run", "/var/run")


def mount_cgroups(hierarchies: tuple[Hierarchy, ...]) -> None:
    """Mounts every hierarchy afresh: the node's own cgroup is the root of what it sees."""
    linux.detach(cgroups.CGROUP_ROOT)
    linux.mount("cgroup", cgroups.CGROUP_ROOT, "tmpfs", options="mode=755")
    for hierarchy in hierarchies:
        hierarchy.path.mkdir(parents=True, exist_ok=True)
        if hierarchy.version == 1:
            options = ",".join(hierarchy.controllers)
            linux.mount("cgroup", hierarchy.path, "cgroup", options=options)
        else:
            linux.mount("cgroup", hierarchy.path, "cgroup2")
        if hierarchy.needs_delegation:
            make_room_for_pods(hierarchy.path)


def make_room_for_pods(root: Path) -> None:
    """Moves this process down: a version 2 group with processes gives its children nothing."""
    (root / "init").mkdir(exist_ok=True)
    (root / "init" / "cgroup.procs").write_text("0")
    cgroups.delegate_controllers(root)


def mount_identity(spec: NodeSpec) -> None:
    """Gives the node its own machine and boot id, and copies of the knobs its kubelet turns."""
    linux.mount(spec.boot_id, "/proc/sys/kernel/random/boot_id", flags=MountFlag.BIND)
    if os.path.exists("/etc/machine-id"):
        linux.mount(spec.machine_id, "/etc/machine-id", flags=MountFlag.BIND)
    for knob in KERNEL_KNOBS:
        copy = Path("/run", knob.replace("/", "."))
        copy.write_text(Path("/proc/sys", knob).read_text())
        linux.mount(copy, f"/proc/sys/{knob}", flags=MountFlag.BIND)


class Services:
    """The node's services: started, and started again when they end."""

    def __init__(self, spec: NodeSpec) -> None:
        """Takes the command lines; starts nothing."""
        self._spec = spec
        self._commands = build_services(spec)
        self._labels: dict[int, str] = {}

    def launch(self, label: str) -> None:
        """Starts one service in a session of its own."""
        argv = self._commands[label]
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        files = (
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(self._spec.log(label)), append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        )
        pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=files, setsid=True)
        self._labels[pid] = label

    def keep(self) -> NoReturn:
        """Reaps every orphan of the node for ever and starts again what ended."""
        while True:
            pid, status = os.wait()
            label = self._labels.pop(pid, None)
            if label:
                code = os.waitstatus_to_exitcode(status)
                sys.stderr.write(f"{label} ended with {code}, started again\n")
                time.sleep(RESTART_SECONDS)
                self.launch(label)


if __name__ == "__main__":
    main()
