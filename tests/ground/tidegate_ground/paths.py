"""Where the ground keeps things on this machine, and what its kernel objects are called."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidegate_ground.errors import GroundError

CACHE_VARIABLE = "TIDEGATE_CACHE"
# A node has its own file systems at these places, so what lies there on the host is hidden from it.
HIDDEN_IN_NODES = ("/tmp", "/run", "/var", "/mnt")
NAME_PATTERN = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of everything that outlives a process: builds and running grounds.

    Raises:
        GroundError: it lies where nodes cannot see it.
    """
    given = environment.get(CACHE_VARIABLE)
    root = Path(given or Path.home() / ".cache" / "tidegate").expanduser().resolve()
    for hidden in HIDDEN_IN_NODES:
        if root.is_relative_to(Path(hidden).resolve()):
            raise GroundError(
                f"{CACHE_VARIABLE} ({root}) must not lie under {hidden}: nodes have their own "
                f"{hidden}; name a folder outside of {', '.join(HIDDEN_IN_NODES)}."
            )
    return root


def builds_root() -> Path:
    """Returns the folder that holds one folder per built set and key."""
    return cache_root() / "ground"


def grounds_root() -> Path:
    """Returns the folder that holds one state folder per ground."""
    return cache_root() / "grounds"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundPaths:
    """The files and the cgroup of one ground.

    Attributes:
        name: the ground's name, unique within `root`.
        root: the folder of all grounds.
    """

    name: str
    root: Path

    @property
    def state(self) -> Path:
        """The folder that holds all files of this ground."""
        return self.root / self.name

    @property
    def cgroup(self) -> str:
        """The ground's cgroup, the same path in every hierarchy.

        The state folder's digest is in it: two users, or two caches, may use one name.
        """
        digest = hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        return f"tidegate-ground-{self.name}-{digest}"

    @property
    def record(self) -> Path:
        """What was asked for, who owns it, whether it is up."""
        return self.state / "ground.json"

    @property
    def pki(self) -> Path:
        """Certificates, keys and the kubeconfigs of the components."""
        return self.state / "pki"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.state / "logs"

    @property
    def processes(self) -> Path:
        """One pid record per process."""
        return self.state / "processes"

    @property
    def pfs(self) -> Path:
        """The shared folder that every node has at /mnt/pfs."""
        return self.state / "pfs"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, for the host."""
        return self.state / "kubeconfig"

    @property
    def port(self) -> Path:
        """The port on 127.0.0.1 that leads to the API server."""
        return self.state / "port"

    def node(self, node: str) -> Path:
        """Returns the folder of one node's disks and settings."""
        return self.state / "nodes" / node


def ground_paths(name: str) -> GroundPaths:
    """Returns the paths of the ground of that name, whether it exists or not.

    Raises:
        GroundError: the name is none, or the cache lies where nodes cannot see it.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise GroundError(
            f"A ground's name is up to 32 of a-z, 0-9 and '-', starts with a letter and does not "
            f"end with '-'; {name!r} is none."
        )
    return GroundPaths(name=name, root=grounds_root())
