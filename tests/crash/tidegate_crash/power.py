"""File systems whose power can be cut: ext4 on loop devices, as the ground's nodes have them.

Everything here lives as long as the process that made it and no longer, even when that is killed:
the mounts are in a mount namespace of its own, the images are memory without a name, and the kernel
frees a loop device at its last close. So runs side by side do not meet, and nothing has to be
cleaned up. That also keeps the mounts out of namespaces that others make meanwhile: a copy of a
mount there would keep the stopped file system alive, and mounting it again would give that one
back.

Needs root. Called by `power_run`.
"""

import errno
import fcntl
import os
import struct
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tidegate_ground import commands, linux
from tidegate_ground.requirements import has_program

IMAGE_BYTES = 16 << 20
_FLUSH_BUFFERS = 0x1261
"""BLKFLSBUF of linux/fs.h."""
_TRIM = 0xC0185879
"""FITRIM of linux/fs.h."""
_SHUTDOWN_WITH_JOURNAL = 1
_LOOP_CONTROL = "/dev/loop-control"
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CONFIG = struct.Struct("=I56xI240x")
"""`loop_config` of linux/loop.h: the image's descriptor and, within `loop_info64`, the flags."""
_AUTOCLEAR = 4


class PowerError(Exception):
    """The cuts are not those of a real file system; the harness is wrong."""


class Ordering(StrEnum):
    """What ext4 does for programs that do not fsync.

    Attributes:
        USUAL: the defaults of most distributions.
        HARSH: data in any order, and no help for files that are renamed without fsync.
    """

    USUAL = "usual"
    HARSH = "harsh"


# Never `discard`: an ext4 that is shut down discards what a lost transaction had freed.
_OPTIONS = {
    Ordering.USUAL: "",
    Ordering.HARSH: "data=writeback,noauto_da_alloc",
}


def missing_prerequisite() -> str:
    """What this machine lacks for power cuts, a sentence; empty if nothing."""
    if os.geteuid() != 0:
        return "power cuts need root, for loop devices and mounts"
    if not Path(_LOOP_CONTROL).exists():
        return f"power cuts need loop devices, and {_LOOP_CONTROL} is missing"
    lacking = [name for name in ("mkfs.ext4", "umount") if not has_program(name)]
    return f"power cuts need {', '.join(lacking)}" if lacking else ""


def keep_mounts_private() -> None:
    """Moves this process into a mount namespace of its own; it must have one thread."""
    linux.unshare(linux.Namespace.MOUNT)
    linux.mount("none", "/", flags=linux.MountFlag.RECURSIVE | linux.MountFlag.PRIVATE)


def settle(folder: Path) -> None:
    """Makes everything on the file system of a folder durable, and nothing of any other.

    Free blocks become empty, so that bytes of an earlier round never pass for data.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        if linux.LIBC.syncfs(handle):
            raise PowerError(f"{folder}: cannot be synced")
        fcntl.ioctl(handle, _TRIM, struct.pack("QQQ", 0, 2**64 - 1, 0))
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """An ext4 of its own at a folder; `keep_mounts_private` comes first.

    Attributes:
        folder: where it is mounted.
        device: the loop device.
        ordering: how it is mounted.
        handle: keeps the device; it is freed when all copies of this descriptor are closed.
    """

    folder: Path
    device: str
    ordering: Ordering
    handle: int

    @classmethod
    def make(cls, folder: Path, ordering: Ordering) -> "Disk":
        """Makes an empty file system and mounts it at an existing folder."""
        device, handle = _attach()
        options = "lazy_itable_init=1,lazy_journal_init=1"
        small = ("-b", "1024", "-J", "size=1")
        commands.run("mkfs.ext4", "-q", "-m", "0", *small, "-E", options, device)
        disk = cls(folder=folder, device=device, ordering=ordering, handle=handle)
        disk.mount()
        return disk

    def mount(self) -> None:
        """Mounts it; after a cut the kernel replays the journal.

        Raises:
            PowerError: the file system is damaged, which no cut of its power may do.
        """
        linux.mount(self.device, self.folder, "ext4", options=_OPTIONS[self.ordering])
        errors = Path("/sys/fs/ext4", Path(self.device).name, "errors_count").read_text()
        if int(errors):
            raise PowerError(f"{self.device}: {errors.strip()} errors of ext4 after a cut")

    def unmount(self) -> None:
        """Unmounts it.

        Raises:
            CommandFailed: a process still holds a file there.
        """
        commands.run("umount", self.folder)
        # The open handle keeps the device's page cache, and in it names and maps that were never
        # written: without this the next mount would find what the cut has taken.
        fcntl.ioctl(self.handle, _FLUSH_BUFFERS)

    def cut(self, *, is_journal_written: bool) -> None:
        """Cuts its power: from now on every write fails, and what was not synced is gone.

        Args:
            is_journal_written: the kernel's timer wrote the journal just before: names and sizes
                reach the disk as they are, also of files whose data do not.
        """
        if not is_journal_written:
            linux.shut_down_file_system(self.folder)
            return
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, linux.FS_IOC_SHUTDOWN, struct.pack("I", _SHUTDOWN_WITH_JOURNAL))
        finally:
            os.close(handle)

    def close(self) -> None:
        """Takes it away, busy or not; its device is freed when nobody uses it any more."""
        linux.detach(self.folder)
        os.close(self.handle)


def image_name(group: int) -> str:
    """What the images of a process group are called where loop devices are listed."""
    return f"tidegate-power-{group}"


def _attach() -> tuple[str, int]:
    """A loop device over memory that no folder lists, and what keeps both.

    Made with the flag that frees it at its last close, in one call: between the two calls of
    `losetup` a kill would leave it for good.
    """
    image = os.memfd_create(image_name(os.getpgrp()))
    try:
        os.truncate(image, IMAGE_BYTES)
        while True:
            device = f"/dev/loop{_free_number()}"
            handle = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(handle, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(image, _AUTOCLEAR))
            except OSError as error:
                os.close(handle)
                if error.errno != errno.EBUSY:  # somebody else took it meanwhile
                    raise
            else:
                return device, handle
    finally:
        os.close(image)


def _free_number() -> int:
    control = os.open(_LOOP_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    finally:
        os.close(control)
