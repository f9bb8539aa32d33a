"""The ground: a cluster of this machine that a test may hurt."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from tidegate_ground import (
    cgroups,
    commands,
    images,
    locks,
    network,
    paths,
    processes,
    record,
    removal,
    requirements,
    sets,
)
from tidegate_ground.cluster import Cluster
from tidegate_ground.components import Component
from tidegate_ground.control_plane import ControlPlane
from tidegate_ground.errors import GroundError
from tidegate_ground.images import Archive
from tidegate_ground.node import Node
from tidegate_ground.node_spec import NodeSpec
from tidegate_ground.options import GroundOptions
from tidegate_ground.paths import GroundPaths
from tidegate_ground.processes import PidRecord
from tidegate_ground.record import GroundRecord
from tidegate_ground.sets import Toolbox
from tidegate_ground.waiting import wait_until

Report = Callable[[str], None]
SERVICE_ACCOUNT = "/api/v1/namespaces/default/serviceaccounts/default"


def report_nothing(sentence: str) -> None:
    """A report that nobody reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """What a node is doing.

    Attributes:
        is_running: whether its pid 1 is there.
        is_ready: whether the API server shows its present boot as Ready.
    """

    is_running: bool
    is_ready: bool


class Ground(Cluster):
    """One built cluster, reached from any process of this host.

    Bring one up with `Ground.up`, or take one that is up with `Ground.open`. Methods may be
    called from any thread, but for one node or one component by one thread at a time.

    Attributes:
        name: unique per cache folder.
        kubeconfig: the administrator's, for clients on this host.
        pfs: the host's path of the folder that every node has at /mnt/pfs.
        control_plane: its components, to be stopped and started.
    """

    def __init__(self, ground_paths: GroundPaths, programs: Toolbox) -> None:
        """Names a ground; use `up` or `open`."""
        super().__init__(ground_paths.kubeconfig, programs, ground_paths.state / "clients")
        self.name = ground_paths.name
        self.pfs = ground_paths.pfs
        self.control_plane = ControlPlane(ground_paths, programs)
        self._paths = ground_paths
        self._programs = programs

    @classmethod
    def up(
        cls,
        name: str,
        options: GroundOptions,
        *,
        owner: PidRecord | None = None,
        report: Report = report_nothing,
    ) -> Ground:
        """Brings up a ground and returns it when all its nodes are Ready, images loaded.

        Grounds that nobody owns any more are removed first.

        Args:
            name: not that of a ground that is there.
            options: what it is to be.
            owner: the process it must not outlive; None: it stays until it is taken down.
            report: gets a sentence at each stage.

        Raises:
            GroundError: it cannot be, or did not come up; then its logs are left to be read, its
                processes are ended, and the next `up` removes it.
        """
        ground_paths = paths.ground_paths(name)
        check_machine(ground_paths)
        programs = sets.toolbox()
        own = observe_record(options, owner, programs)
        claim(ground_paths, own, report)
        ground = cls(ground_paths, programs)
        try:
            ground._start(options, report)
        except BaseException:
            removal.end_processes(ground_paths)
            report(f"The ground {name} did not come up; its logs are in {ground_paths.logs}.")
            raise
        record.save(dataclasses.replace(own, is_started=True), ground_paths)
        return ground

    @classmethod
    def open(cls, name: str) -> Ground:
        """Returns the ground of that name, which is up.

        Raises:
            GroundError: it is not.
        """
        ground_paths = paths.ground_paths(name)
        found = record.load(ground_paths)
        boot_id = record.observe_boot_id()
        if not found or not found.is_started or found.boot_id != boot_id:
            raise GroundError(
                f"The ground {name} is not up; `python -m tidegate_ground up --name {name}` "
                f"brings it up."
            )
        return cls(ground_paths, Toolbox(folders=found.tool_folders))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, running or not, in order."""
        return tuple(self.node(f"node{i + 1}") for i in range(self.options.nodes))

    @property
    def options(self) -> GroundOptions:
        """What the ground was asked to be."""
        found = record.load(self._paths)
        if found is None:
            raise GroundError(f"There is no ground {self.name} any more.")
        return found.options

    def node(self, name: str) -> Node:
        """Returns the node of that name, `node1` for example."""
        return Node(name, self._paths, self._programs, self.control_plane)

    def load(self, files: Iterable[Path]) -> list[str]:
        """Loads docker-archives into all nodes and returns the names of the images that changed.

        An image whose content a node has already is not loaded again. A node that is not running
        loads it when it is started.

        Raises:
            GroundError: a file is no docker-archive with one named image.
        """
        archives = [self._keep(images.read_archive(Path(file).resolve())) for file in files]
        with ThreadPoolExecutor() as pool:
            loaded = list(pool.map(lambda node: node.load(archives), self.nodes))
        return sorted({archive.image for per_node in loaded for archive in per_node})

    def exec(self, *argv: str, check: bool = True) -> CompletedProcess[str]:
        """Runs a command of this host in the control plane's network, and returns what it wrote.

        The API server reaches what listens there on 10.89.0.1; the host does not.

        Raises:
            CommandFailed: `check` is set and the exit code is not zero.
        """
        return commands.run(*network.enter_network(self.control_plane.network), *argv, check=check)

    def observe_components(self) -> dict[str, bool]:
        """Returns the control plane's components and whether each runs."""
        return {name: self.control_plane.is_running(name) for name in Component}

    def observe_nodes(self) -> dict[str, NodeStatus]:
        """Returns what each node is doing."""
        return {
            node.name: NodeStatus(is_running=node.is_running, is_ready=node.is_ready)
            for node in self.nodes
        }

    def down(self) -> None:
        """Ends the ground and deletes its files; nothing of it is left.

        Raises:
            DeadlineExceeded: a process outside of the ground holds something of it; the sentence
                says what, and `down` may be tried again.
        """
        take_down(self._paths)

    def _start(self, options: GroundOptions, report: Report) -> None:
        began = time.monotonic()

        def say(what: str) -> None:
            report(f"{time.monotonic() - began:5.1f} s  {what}")

        self.control_plane.prepare()
        nodes = self._create_nodes(options)
        # The nodes unpack their images while the API server starts; their kubelets come after.
        with ThreadPoolExecutor() as pool:
            booted = [pool.submit(node.start, wait_ready=False) for node in nodes]
            self.control_plane.start()
            say("control plane ready")
            for result in booted:
                result.result()
        for node in nodes:
            node.wait_ready()
        say(f"{len(nodes)} nodes Ready")
        # A pod made before this account exists is refused.
        account = self.control_plane.read
        wait_until("the default service account", lambda: account(SERVICE_ACCOUNT), 60)

    def _create_nodes(self, options: GroundOptions) -> tuple[Node, ...]:
        files = [sets.image_archive("pause"), *options.images]
        archives = tuple(self._keep(images.read_archive(file.resolve())) for file in files)
        specs = [
            NodeSpec(
                number=number,
                paths=self._paths,
                cni_folder=self._programs.program("host-local").parent,
                var_bytes=options.var_bytes,
                nvme_bytes=options.nvme_bytes,
                mounts=options.mounts,
                archives=archives,
            )
            for number in range(1, options.nodes + 1)
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda spec: self.node(spec.name).create(spec), specs))
        return self.nodes

    def _keep(self, archive: Archive) -> Archive:
        """Returns the archive at a place where nodes see it and nobody changes it."""
        if archive.path.is_relative_to(paths.builds_root()):
            return archive
        kept = self._paths.state / "images" / f"{archive.key}.tar"
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            shutil.copyfile(archive.path, kept)
        return dataclasses.replace(archive, path=kept)


def check_machine(ground_paths: GroundPaths) -> None:
    """Raises a GroundError that says why no ground can come up here, if so."""
    requirements.require_root()
    cgroups.require_controllers()
    sets.require_built()
    room = requirements.free_bytes(ground_paths.root)
    requirements.require_disk(requirements.RUN_BYTES, room, ground_paths.root)


def observe_record(
    options: GroundOptions, owner: PidRecord | None, programs: Toolbox
) -> GroundRecord:
    """Returns the record of a ground that this process now brings up."""
    return GroundRecord(
        boot_id=record.observe_boot_id(),
        starter=processes.require(os.getpid()),
        owner=owner,
        is_started=False,
        options=options,
        tool_folders=programs.folders,
    )


def claim(ground_paths: GroundPaths, own: GroundRecord, report: Report) -> None:
    """Makes the ground's folder, with its record, as the only one to do so.

    Raises:
        GroundError: a ground of that name is there and somebody owns it.
    """
    ground_paths.root.mkdir(parents=True, exist_ok=True)
    with locks.locked(ground_paths.root):
        for name, reason in removal.remove_abandoned(ground_paths).items():
            report(f"Removed the ground {name}: {reason}.")
        if ground_paths.state.exists():
            raise GroundError(
                f"The ground {ground_paths.name} is there already; `python -m tidegate_ground "
                f"down --name {ground_paths.name}` takes it down."
            )
        for folder in (ground_paths.pki, ground_paths.logs, ground_paths.processes):
            folder.mkdir(parents=True)
        ground_paths.pfs.mkdir()
        ground_paths.pfs.chmod(0o755)
        record.save(own, ground_paths)


def take_down(ground_paths: GroundPaths) -> None:
    """Ends a ground, however far it came, and deletes its files.

    Raises:
        DeadlineExceeded: as `Ground.down`.
    """
    if ground_paths.root.exists():
        with locks.locked(ground_paths.root):
            removal.remove(ground_paths)
