"""System calls that Python 3.11 does not offer; every ctypes call of the ground is here."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from enum import IntFlag
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
# linux/fs.h and fs/ext4: stop all writes of a file system, without writing its journal first.
FS_IOC_SHUTDOWN = 0x8004587D
SHUTDOWN_WITHOUT_JOURNAL = 2


class Namespace(IntFlag):
    """Flags of clone(2), unshare(2) and setns(2)."""

    MOUNT = 0x00020000
    CGROUP = 0x02000000
    UTS = 0x04000000
    IPC = 0x08000000
    PID = 0x20000000
    NETWORK = 0x40000000


class MountFlag(IntFlag):
    """Flags of mount(2)."""

    READ_ONLY = 1
    REMOUNT = 32
    BIND = 4096
    RECURSIVE = 16384
    PRIVATE = 1 << 18
    SHARED = 1 << 20


def unshare(namespaces: Namespace) -> None:
    """Puts this process into new namespaces (a new pid namespace: its later children only)."""
    _check(LIBC.unshare(int(namespaces)), "unshare", str(namespaces))


def mount(
    source: str | Path,
    target: str | Path,
    kind: str = "",
    flags: MountFlag = MountFlag(0),  # noqa: B008  an immutable value
    options: str = "",
) -> None:
    """Calls mount(2); `kind` is the file system type, `options` its comma-separated data."""
    result = LIBC.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(int(flags)),
        options.encode() or None,
    )
    _check(result, "mount", str(target))


def detach(target: str | Path) -> None:
    """Takes a mount and all below it out of this mount namespace, busy or not."""
    _check(LIBC.umount2(os.fsencode(target), 2), "umount", str(target))


def shut_down_file_system(folder: Path) -> None:
    """Stops the ext4 file system of `folder` as a power cut does.

    What was fsynced stays; whatever only the page cache or the running journal transaction holds
    is gone, and every later write through the mount fails.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(handle, FS_IOC_SHUTDOWN, struct.pack("I", SHUTDOWN_WITHOUT_JOURNAL))
    finally:
        os.close(handle)


def _check(result: int, call: str, subject: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}", subject)
