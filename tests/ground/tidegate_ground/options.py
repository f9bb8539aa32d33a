"""What a ground is asked to be. Pure, but for looking whether a folder is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tidegate_ground.errors import GroundError

GIB = 1 << 30
MIB = 1 << 20
MOST_NODES = 100
SMALLEST_DISK_BYTES = 64 * MIB
NVME = "/mnt/nvme"
PFS = "/mnt/pfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder of the host that every node has, read-only.

    Attributes:
        source: the folder on the host, absolute.
        target: where nodes have it: a path below /mnt, so that no mount point is made on the host.
    """

    source: Path
    target: str


def parse_mount(text: str) -> Mount:
    """Reads `HOST_FOLDER:NODE_FOLDER`.

    Raises:
        GroundError: it is not of that form, or one of the two folders cannot be used.
    """
    source, colon, target = text.rpartition(":")
    if not colon:
        raise GroundError(f"A mount is written HOST_FOLDER:NODE_FOLDER; {text!r} has no colon.")
    mount = Mount(source=Path(source).resolve(), target=target)
    check_mount(mount)
    return mount


def check_mount(mount: Mount) -> None:
    """Raises a GroundError when one of the two folders cannot be used."""
    target = PurePosixPath(mount.target)
    inside = target.is_relative_to("/mnt") and ".." not in target.parts and target != target.parent
    own = any(target.is_relative_to(place) for place in (NVME, PFS))
    if not inside or own or mount.target == "/mnt":
        raise GroundError(
            f"Nodes can have a host folder below /mnt, outside of {NVME} and {PFS}; "
            f"{mount.target!r} is not there."
        )
    if not mount.source.is_dir():
        raise GroundError(f"{mount.source}, to be mounted at {mount.target}, is not a folder.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundOptions:
    """What a ground is asked to be.

    Attributes:
        nodes: how many; they are named node1, node2 and so on.
        nvme_bytes: size of each node's /mnt/nvme, a sparse file on the host.
        var_bytes: size of each node's /var, a sparse file on the host.
        mounts: folders of the host that every node has, read-only.
        images: docker-archives that every node has before it is Ready, beside the pause image.
    """

    nodes: int = 3
    nvme_bytes: int = 4 * GIB
    var_bytes: int = 20 * GIB
    mounts: tuple[Mount, ...] = ()
    images: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        """Raises a GroundError that names the option that is out of bounds."""
        if not 1 <= self.nodes <= MOST_NODES:
            raise GroundError(f"nodes is from 1 to {MOST_NODES}; {self.nodes} is not.")
        for name in ("nvme_bytes", "var_bytes"):
            if getattr(self, name) < SMALLEST_DISK_BYTES:
                raise GroundError(
                    f"{name} is at least {SMALLEST_DISK_BYTES}; {getattr(self, name)} is less."
                )
        for mount in self.mounts:
            check_mount(mount)

    def to_json(self) -> dict[str, Any]:
        """Returns the options as they are stored."""
        return {
            "nodes": self.nodes,
            "nvme_bytes": self.nvme_bytes,
            "var_bytes": self.var_bytes,
            "mounts": mounts_to_json(self.mounts),
            "images": [str(image) for image in self.images],
        }


def mounts_to_json(mounts: tuple[Mount, ...]) -> list[list[str]]:
    """Returns mounts as they are stored."""
    return [[str(mount.source), mount.target] for mount in mounts]


def mounts_from_json(stored: list[list[str]]) -> tuple[Mount, ...]:
    """Reads what `mounts_to_json` returned."""
    return tuple(Mount(source=Path(source), target=target) for source, target in stored)


def options_from_json(stored: Mapping[str, Any]) -> GroundOptions:
    """Reads what `GroundOptions.to_json` returned."""
    return GroundOptions(
        nodes=stored["nodes"],
        nvme_bytes=stored["nvme_bytes"],
        var_bytes=stored["var_bytes"],
        mounts=mounts_from_json(stored["mounts"]),
        images=tuple(Path(image) for image in stored["images"]),
    )
