"""Images as docker-archives: what one holds, and loading it into a node's containerd.

The same code loads inside a node, at its start, and from the host, later. A node remembers on its
own disk what it has loaded, by content, so an unchanged image is not unpacked again.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate_ground import commands
from tidegate_ground.errors import GroundError

# Below a node's /var, so that it is lost together with what containerd unpacked.
LOADED_RECORD = "var/lib/ground-images.json"
IMPORT = ("-n", "k8s.io", "images", "import", "--local", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One docker-archive.

    Attributes:
        path: the tar file.
        image: the name the kubelet looks for.
        key: digest of the image's configuration, which holds the digests of its layers.
    """

    path: Path
    image: str
    key: str

    def to_json(self) -> dict[str, str]:
        """Returns the archive as it is stored."""
        return {"path": str(self.path), "image": self.image, "key": self.key}

    @classmethod
    def from_json(cls, stored: Mapping[str, str]) -> Archive:
        """Reads what `to_json` returned."""
        return cls(path=Path(stored["path"]), image=stored["image"], key=stored["key"])


def normalize_image_name(name: str) -> str:
    """Returns the full name of an image: what has no registry in front comes from docker.io."""
    host, slash, _ = name.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost"):
        return name
    return f"docker.io/{name}" if slash else f"docker.io/library/{name}"


def read_archive(path: Path) -> Archive:
    """Reads what a docker-archive holds.

    Raises:
        GroundError: it is no docker-archive with one named image.
    """
    if not path.is_file():
        raise GroundError(f"There is no image archive {path}.")
    try:
        with tarfile.open(path) as tar:
            images = json.loads(_member(tar, "manifest.json"))
            if len(images) != 1 or not images[0].get("RepoTags"):
                raise GroundError(f"{path} must hold exactly one image, with a name.")
            config = _member(tar, images[0]["Config"])
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        raise GroundError(
            f"{path} is not a docker-archive; make one with `buildah push IMAGE "
            f"docker-archive:FILE:IMAGE`, `podman save` or `docker save`."
        ) from error
    name = normalize_image_name(images[0]["RepoTags"][0])
    return Archive(path=path, image=name, key=hashlib.sha256(config).hexdigest())


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(name)
    with file:
        return file.read()


def decide_loads(archives: Sequence[Archive], loaded: Mapping[str, str]) -> list[Archive]:
    """Returns the archives whose image a node has not, or has with another content."""
    return [archive for archive in archives if loaded.get(archive.image) != archive.key]


def load(archives: Sequence[Archive], ctr: Sequence[str | Path], root: Path) -> list[Archive]:
    """Loads into a node's containerd what it does not have yet, and returns that.

    Args:
        archives: what the node is to have.
        ctr: the command that reaches its containerd.
        root: the node's root folder, as this process sees it.

    Raises:
        CommandFailed: containerd refused an archive.
    """
    record = root / LOADED_RECORD
    loaded: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    missing = decide_loads(archives, loaded)
    for archive in missing:
        with archive.path.open("rb") as stream:
            commands.run(*ctr, *IMPORT, stdin=stream)
        loaded[archive.image] = archive.key
    if missing:
        # containerd fsyncs its database but not what it unpacks: after a power cut it would
        # believe in files that are not there. The record must not be older than they are.
        commands.run("sync", "-f", record.parent)
        record.write_text(json.dumps(loaded))
        commands.run("sync", record)
    return missing
