"""A node as tests handle it: killed, cut off its power, started, its disk filled."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tidegate_ground import cgroups, commands, disks, images, linux, network, processes
from tidegate_ground.control_plane import ControlPlane, python_environment
from tidegate_ground.errors import CommandFailed, GroundError
from tidegate_ground.images import Archive
from tidegate_ground.node_spec import NodeSpec, build_settings, node_spec_from_json, spec_path
from tidegate_ground.options import NVME
from tidegate_ground.paths import GroundPaths
from tidegate_ground.processes import PidRecord
from tidegate_ground.sets import Toolbox
from tidegate_ground.waiting import wait_until

END_SECONDS = 20
READY_SECONDS = 120
FILLER = f"{NVME}/.ground-filler"


def shows_ready(node: Any, boot_id: str) -> bool:
    """Says whether a Node object is Ready and of that very boot, not of one before."""
    if not node or node["status"].get("nodeInfo", {}).get("bootID") != boot_id:
        return False
    conditions = node["status"].get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


class Node:
    """One node of a ground.

    Its disks are files on the host, so they outlive its processes, as real disks do.
    """

    def __init__(
        self, name: str, paths: GroundPaths, programs: Toolbox, control: ControlPlane
    ) -> None:
        """Names a node; starts nothing."""
        self.name = name
        self._paths = paths
        self._programs = programs
        self._control = control
        self._record = paths.processes / f"{name}.json"
        self._cgroup = f"{paths.cgroup}/{name}"

    @property
    def is_running(self) -> bool:
        """Whether the node's pid 1 is there; says nothing about Ready."""
        record = processes.load(self._record)
        return record is not None and processes.is_alive(record)

    @property
    def is_ready(self) -> bool:
        """Whether the API server shows the node's latest boot as Ready."""
        boot_id = self._spec().boot_id.read_text().strip()
        return shows_ready(self._control.read_json(f"/api/v1/nodes/{self.name}"), boot_id)

    @property
    def init(self) -> PidRecord:
        """The node's pid 1, as the host knows it.

        Raises:
            GroundError: the node is not running.
        """
        record = processes.load(self._record)
        if record is None or not processes.is_alive(record):
            raise GroundError(f"{self.name} is not running; start() it first.")
        return record

    def path(self, inside: str) -> Path:
        """Returns a path of the running node as the host reaches it, `/mnt/nvme/…` for example.

        Through it a test reads and writes the node's own file systems. A file kept open there
        keeps the node's disk busy when the node is killed.
        """
        return Path(f"/proc/{self.init.pid}/root") / inside.lstrip("/")

    def exec(self, *argv: str, check: bool = True) -> CompletedProcess[str]:
        """Runs a command inside the node, with all its namespaces, and returns what it wrote.

        Raises:
            CommandFailed: `check` is set and the exit code is not zero.
        """
        return commands.run(*self.enter(), *argv, check=check)

    def enter(self) -> list[str]:
        """Returns the head of a command that runs inside the node."""
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
        path = python_environment(self._programs)["PATH"]
        return ["nsenter", f"--target={self.init.pid}", *spaces, "--", "env", f"PATH={path}"]

    def kill(self) -> None:
        """Ends everything in the node at once, with SIGKILL.

        Page cache survives, so what was written but not fsynced is still on its disks: for lost
        writes use `power_cut`. Does nothing when the node is not running.
        """
        spec = self._spec()
        record = processes.load(self._record)
        if record is not None:
            processes.end(record, END_SECONDS)
        cgroups.end_all(self._cgroup, END_SECONDS)
        disks.wait_until_free(spec.folder, END_SECONDS)
        network.disconnect_node(self._control.network, spec.number)
        cgroups.remove(self._cgroup)
        self._record.unlink(missing_ok=True)

    def power_cut(self) -> None:
        """Stops the node's disks, then ends everything in it: what was not fsynced is gone.

        It does not tear or reorder writes that had reached the disks.
        """
        for folder in (NVME, "/var"):
            linux.shut_down_file_system(self.path(folder))
        self.kill()

    def start(self, *, keep_disk: bool = True, wait_ready: bool = True) -> None:
        """Starts the node that is not running, as one that boots after a loss of power.

        Args:
            keep_disk: False gives it empty disks, /var and /mnt/nvme, as a replaced machine has;
                its images are loaded again.
            wait_ready: whether to return only when the API server shows this boot as Ready.

        Raises:
            GroundError: it is running, or it ended while it started.
            DeadlineExceeded: it did not become Ready.
        """
        if self.is_running:
            raise GroundError(f"{self.name} is running; kill() it before start().")
        spec = self._spec()
        if not keep_disk:
            for disk in spec.disks:
                disk.unlink(missing_ok=True)
        disks.make_missing(spec.disks)
        spec.boot_id.write_text(f"{uuid.uuid4()}\n")
        spec.started.unlink(missing_ok=True)
        self._boot(spec)
        if wait_ready:
            self.wait_ready()

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Waits until the API server shows the node's present boot as Ready, images loaded.

        Raises:
            GroundError: the node ended while it started.
            DeadlineExceeded: it did not become Ready.
        """
        spec = self._spec()

        def ready() -> bool:
            if not self.is_running:
                raise GroundError(f"{self.name} ended while it started; see {spec.log('init')}.")
            assert spec.started.exists(), "its images are being loaded"
            return self.is_ready

        wait_until(f"{self.name} Ready", ready, seconds)

    def load(self, archives: Iterable[Archive]) -> list[Archive]:
        """Loads images into the node and returns those it did not have.

        The node has them, too, when it is started with empty disks. One that is not running
        loads them when it is started.

        Raises:
            CommandFailed: containerd refused an archive.
        """
        spec = self._spec()
        wanted = tuple(archives)
        names = {archive.image for archive in wanted}
        kept = tuple(archive for archive in spec.archives if archive.image not in names)
        self._write_spec(dataclasses.replace(spec, archives=(*kept, *wanted)))
        if not self.is_running:
            return []
        ctr = [*self.enter(), "ctr"]
        return images.load(wanted, ctr, self.path("/"))

    def fill_disk(self, leave_bytes: int = 0) -> None:
        """Fills /mnt/nvme until only so many bytes are left to writers; 0 gives ENOSPC at once.

        The space is taken without writing, so it costs no room on the host.
        """
        self.free_disk()
        folder = self.path(NVME)
        with self.path(FILLER).open("wb") as filler:
            taken = 0
            while (excess := disks.available_bytes(folder) - leave_bytes) > 0:
                taken += disks.take_space(filler.fileno(), taken, excess)

    def free_disk(self) -> None:
        """Gives back what `fill_disk` took."""
        self.path(FILLER).unlink(missing_ok=True)

    def create(self, spec: NodeSpec) -> None:
        """Writes the node's specification and settings and makes its disks; starts nothing."""
        spec.folder.mkdir(parents=True)
        for name, text in build_settings(spec).items():
            file = spec.settings / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        spec.machine_id.write_text(f"{uuid.uuid4().hex}\n")
        self._write_spec(spec)
        self._control.admit_node(spec.name, spec.address)
        disks.make_missing(spec.disks)

    def _spec(self) -> NodeSpec:
        try:
            stored = json.loads(spec_path(self._paths, self.name).read_text())
        except FileNotFoundError:
            raise GroundError(f"The ground {self._paths.name} has no node {self.name}.") from None
        return node_spec_from_json(stored)

    def _write_spec(self, spec: NodeSpec) -> None:
        spec_path(self._paths, self.name).write_text(json.dumps(spec.to_json(), indent=1))

    def _boot(self, spec: NodeSpec) -> None:
        cgroups.make(self._cgroup)
        head = processes.enter_groups(cgroups.join_files(self._cgroup))
        head += processes.clean_environment(python_environment(self._programs))
        file = str(spec_path(self._paths, self.name))
        argv = [*head, sys.executable, "-m", "tidegate_ground.node_init", file]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as starter:
            assert starter.stdin and starter.stdout and starter.stderr
            line = starter.stdout.readline()
            if not line:
                words = starter.stderr.read()
                raise CommandFailed(argv, starter.wait(), "", words)
            init = processes.require(int(line))
            processes.save(init, self._record)
            network.connect_node(self._control.network, init, spec.number)
            # Leaving closes its standard input, which the node's pid 1 waits for.
