"""The nodes' disks: sparse files of the host with an ext4 each, mounted through loop devices."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from tidegate_ground import commands
from tidegate_ground.errors import GroundError
from tidegate_ground.waiting import wait_until


def make_missing(sizes_bytes: Mapping[Path, int]) -> None:
    """Makes those disks that are not there: sparse files with an ext4 each."""
    for disk, size_bytes in sizes_bytes.items():
        if not disk.exists():
            with disk.open("wb") as file:
                file.truncate(size_bytes)
            lazily = "lazy_itable_init=1,lazy_journal_init=1"
            commands.run("mkfs.ext4", "-q", "-m", "0", "-E", lazily, disk)


def available_bytes(folder: Path) -> int:
    """Returns what writers can still take of the file system of `folder`."""
    figures = os.statvfs(folder)
    return figures.f_bavail * figures.f_frsize


def take_space(file: int, offset: int, size_bytes: int) -> int:
    """Reserves up to `size_bytes` of a file's disk from `offset` on, and returns how many.

    A request may fail although space is left, because the map of the file needs some, too; so it
    is halved until it fits.
    """
    while size_bytes:
        try:
            os.posix_fallocate(file, offset, size_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            size_bytes //= 2
        else:
            return size_bytes
    raise GroundError("The disk cannot be filled any further.")


def observe_loop_files() -> list[str]:
    """Returns the files that loop devices of this machine hold."""
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.append(file.read_text().strip())
        except OSError:  # the device was freed while it was read
            continue
    return found


def wait_until_free(folder: Path, seconds: float) -> None:
    """Waits until no loop device holds a file below the folder.

    Raises:
        DeadlineExceeded: one was still held, by a process outside of its node.
    """

    def freed() -> bool:
        held = [file for file in observe_loop_files() if Path(file).is_relative_to(folder)]
        assert not held, f"still held, by a process outside of its node: {held}"
        return True

    wait_until(f"the release of the disks in {folder}", freed, seconds)
