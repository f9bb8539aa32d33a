"""What the ground needs of this machine: root, programs of Debian packages, Go, disk.

Each check raises a GroundError of one sentence that says what is missing and what to do.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from tidegate_ground import commands, paths
from tidegate_ground.errors import CommandFailed, GroundError
from tidegate_ground.options import GIB

# A program that only this package brings, to its package.
PACKAGES = {
    "runc": "runc",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "fusermount3": "fuse3",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "mkfs.ext4": "e2fsprogs",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
OLDEST_GO = (1, 26)
USUAL_GO = Path("/usr/local/go/bin/go")
RUN_BYTES = 4 * GIB


def require_root() -> None:
    """Raises a GroundError when this process is not root's."""
    if os.geteuid():
        raise GroundError(
            "The ground needs root, for namespaces, mounts and cgroups; run it as root."
        )


def missing_packages(has_program: Callable[[str], bool]) -> list[str]:
    """Returns the Debian packages whose programs are not there."""
    return [package for program, package in PACKAGES.items() if not has_program(program)]


def has_program(name: str) -> bool:
    """Says whether a program is found on PATH or in the administrator's folders."""
    return shutil.which(name, path=commands.search_path()) is not None


def install_packages(packages: Iterable[str]) -> None:
    """Installs Debian packages.

    Raises:
        GroundError: this is no system with apt-get, or it could not install them.
    """
    wanted = list(packages)
    if not has_program("apt-get"):
        raise GroundError(
            f"Missing: {', '.join(wanted)} (names of Debian packages); there is no apt-get here, "
            f"install them with this system's own package manager."
        )
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    options = ["--yes", "--quiet", "--no-install-recommends"]
    try:
        commands.run("apt-get", "update", "--quiet", env=quiet)
        commands.run("apt-get", "install", *options, *wanted, env=quiet)
    except CommandFailed as error:
        raise GroundError(f"apt-get could not install {', '.join(wanted)}: {error}") from error


def parse_go_version(text: str) -> tuple[int, int]:
    """Returns major and minor version of what `go version` prints.

    Raises:
        GroundError: it prints something else.
    """
    found = re.search(r"\bgo(\d+)\.(\d+)", text)
    if not found:
        raise GroundError(f"`go version` prints no version: {text.strip()!r}.")
    return int(found[1]), int(found[2])


def find_go() -> Path:
    """Returns the Go program, which is new enough.

    Raises:
        GroundError: there is none, or it is too old.
    """
    oldest = ".".join(map(str, OLDEST_GO))
    on_path = shutil.which("go")
    go = Path(on_path) if on_path else USUAL_GO
    if not go.exists():
        raise GroundError(
            f"There is no Go: install Go {oldest} or newer (https://go.dev/dl), on PATH or in "
            f"/usr/local/go."
        )
    found = parse_go_version(commands.run(go, "version", env={"GOTOOLCHAIN": "local"}).stdout)
    if found < OLDEST_GO:
        raise GroundError(
            f"{go} is Go {found[0]}.{found[1]}; the ground needs Go {oldest} or newer."
        )
    return go


def require_disk(needed_bytes: int, free_bytes: int, folder: Path) -> None:
    """Raises a GroundError, with both figures, when a folder has not enough room."""
    if free_bytes < needed_bytes:
        raise GroundError(
            f"The ground needs {needed_bytes / GIB:.0f} GiB in {folder}, {free_bytes / GIB:.1f} "
            f"GiB are free; make room, or name another folder in {paths.CACHE_VARIABLE}."
        )


def free_bytes(folder: Path) -> int:
    """Returns what is free where a folder is, or will be made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def decide_needed_bytes(builds_bytes: Iterable[int]) -> int:
    """Returns the room, in bytes, for these builds and for a ground that runs."""
    return RUN_BYTES + sum(builds_bytes)
