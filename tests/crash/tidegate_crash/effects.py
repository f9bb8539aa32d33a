"""What each system call does to a disk and to the process that makes it.

Every effect takes the disk, the process and the arguments of the call, and either returns what the
kernel returns (hashable, so that a run can be recognised) or raises its OSError. A call may be made
for a dead process, late.
"""

import errno
import fcntl
import os
from typing import Any, NamedTuple

from tidegate_crash.disk import ROOT, Disk
from tidegate_crash.nodes import LOCK, WHOLE, Directory, File, Slot, fail
from tidegate_crash.process import Call, NotSimulated, OpenFile, Process

_OPEN_FLAGS = (
    os.O_WRONLY
    | os.O_RDWR
    | os.O_CREAT
    | os.O_EXCL
    | os.O_NOFOLLOW
    | os.O_DIRECTORY
    | os.O_NONBLOCK
    | os.O_CLOEXEC
)
_BLOCKS = 1 << 20
_UID, _GID = os.geteuid(), os.getegid()


class Stat(NamedTuple):
    """What stat tells; a field that is missing here is not simulated."""

    st_mode: int
    st_ino: int
    st_dev: int
    st_size: int
    st_uid: int
    st_gid: int
    st_mtime_ns: int

    @property
    def st_ctime_ns(self) -> int:
        """As coarse as the modification time."""
        return self.st_mtime_ns

    @property
    def st_mtime(self) -> float:
        """In seconds."""
        return self.st_mtime_ns / 1e9


class StatVfs(NamedTuple):
    """What fstatvfs tells of a disk that is never full."""

    f_frsize: int = 4096
    f_blocks: int = _BLOCKS
    f_bfree: int = _BLOCKS
    f_bavail: int = _BLOCKS


def _walk(disk: Disk, process: Process, path: str, at: int | None) -> tuple[int, list[str]]:
    """Where a path starts, and its parts."""
    if path.startswith("/"):
        start = ROOT
    elif at is None:
        raise NotSimulated(f"{path}: relative to no open folder")
    else:
        start = process.file(at).inode
        disk.directory(start)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise NotSimulated(f"{path}: goes up")
    if not path:
        raise fail(errno.ENOENT)
    return start, parts


def _find(disk: Disk, process: Process, path: str, at: int | None) -> int:
    if at is not None and _is_name(path):
        return disk.lookup(process.file(at).inode, path)
    inode, parts = _walk(disk, process, path, at)
    for part in parts:
        inode = disk.lookup(inode, part)
    return inode


def _is_name(path: str) -> bool:
    """Most paths are a name in an open folder."""
    return "/" not in path and path not in ("", ".", "..")


def _parent(disk: Disk, process: Process, path: str, at: int | None) -> Slot:
    """The directory and name that a path ends in; the name is empty where it ends in a dot."""
    if at is not None and _is_name(path):
        inode, parts = process.file(at).inode, [path]
    else:
        inode, parts = _walk(disk, process, path, at)
    for part in parts[:-1]:
        inode = disk.lookup(inode, part)
    disk.directory(inode)
    return inode, parts[-1] if parts else ""


def _slot(disk: Disk, process: Process, path: str, at: int | None, of_dots: int) -> Slot:
    """As `_parent`; `of_dots` is the error of a path that ends in a dot."""
    slot = _parent(disk, process, path, at)
    if not slot[1]:
        raise fail(of_dots)
    return slot


def open_(disk: Disk, process: Process, path: str, flags: int, mode: int, at: int | None) -> int:
    """open and openat."""
    if flags & ~_OPEN_FLAGS:
        raise NotSimulated(f"open of {path} with flags {flags & ~_OPEN_FLAGS:o}")
    if flags & os.O_CREAT:
        inode = _open_or_create(disk, process, path, flags, mode, at)
    else:
        inode = _find(disk, process, path, at)
    node = disk.nodes[inode]
    if isinstance(node, Directory):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise fail(errno.EISDIR)
    elif flags & os.O_DIRECTORY or path.endswith("/"):
        raise fail(errno.ENOTDIR)
    return process.add(OpenFile(inode, flags))


def _open_or_create(
    disk: Disk, process: Process, path: str, flags: int, mode: int, at: int | None
) -> int:
    if flags & os.O_DIRECTORY:
        raise NotSimulated(f"open of {path} with O_CREAT and O_DIRECTORY")
    slot = _slot(disk, process, path, at, errno.EEXIST if flags & os.O_EXCL else errno.EISDIR)
    found = disk.find(*slot)
    if found is None:
        inode = process.new_inode()
        disk.create(slot, inode, mode, process.machine)
        return inode
    if flags & os.O_EXCL:
        raise fail(errno.EEXIST)
    return found


def close(disk: Disk, process: Process, fd: int) -> None:
    """close."""
    file = process.file(fd)
    if process.locks.get(file.inode) is file:
        disk.note_write(file.inode, LOCK)
    process.close(fd)


def dup(disk: Disk, process: Process, fd: int) -> int:
    """dup."""
    file = process.file(fd)
    file.references += 1
    return process.add(file)


def mkdir(disk: Disk, process: Process, path: str, mode: int, at: int | None) -> None:
    """mkdir and mkdirat."""
    slot = _slot(disk, process, path, at, errno.EEXIST)
    disk.mkdir(slot, process.new_inode(), mode & 0o1777, process.machine)


def rmdir(disk: Disk, process: Process, path: str, at: int | None) -> None:
    """rmdir."""
    disk.rmdir(_slot(disk, process, path, at, errno.EINVAL), process.machine)


def unlink(disk: Disk, process: Process, path: str, at: int | None) -> None:
    """unlink and unlinkat."""
    disk.unlink(_slot(disk, process, path, at, errno.EISDIR), process.machine)


def rename(
    disk: Disk, process: Process, source: str, target: str, at: int | None, into: int | None
) -> None:
    """rename and renameat."""
    old = _parent(disk, process, source, at)
    new = _parent(disk, process, target, into)
    if not old[1] or not new[1]:
        raise fail(errno.EBUSY)
    disk.rename(old, new, process.machine)


def link(
    disk: Disk, process: Process, source: str, target: str, at: int | None, into: int | None
) -> None:
    """link and linkat."""
    inode = _find(disk, process, source, at)
    disk.link(inode, _slot(disk, process, target, into, errno.EEXIST), process.machine)


def stat_(disk: Disk, process: Process, path: str, at: int | None) -> Stat:
    """stat, lstat and fstatat."""
    return _stat(disk, _find(disk, process, path, at))


def fstat(disk: Disk, process: Process, fd: int) -> Stat:
    """fstat."""
    return _stat(disk, process.file(fd).inode)


def _stat(disk: Disk, inode: int) -> Stat:
    disk.note_read(inode, WHOLE)
    node = disk.nodes[inode]
    size = len(node.data) if isinstance(node, File) else 4096
    return Stat(node.mode, inode, node.device, size, _UID, _GID, node.mtime)


def fstatvfs(disk: Disk, process: Process, fd: int) -> StatVfs:
    """fstatvfs."""
    process.file(fd)
    return StatVfs()


def listdir(disk: Disk, process: Process, fd: int) -> tuple[str, ...]:
    """getdents of an open directory, as one call."""
    return tuple(sorted(disk.list_names(process.file(fd).inode)))


def utime(disk: Disk, process: Process, target: str | int, at: int | None) -> None:
    """utimensat to the present."""
    inode = (
        process.file(target).inode if isinstance(target, int) else _find(disk, process, target, at)
    )
    disk.set_mtime(inode, disk.now)


def fchmod(disk: Disk, process: Process, fd: int, mode: int) -> None:
    """fchmod."""
    disk.set_mode(process.file(fd).inode, mode)


def fchown(disk: Disk, process: Process, fd: int, uid: int, gid: int) -> None:
    """fchown to the user there is; there are no others."""
    process.file(fd)
    if uid not in (-1, _UID) or gid not in (-1, _GID):
        raise NotSimulated("fchown to somebody else")


def read(disk: Disk, process: Process, fd: int, size: int) -> bytes:
    """read."""
    file = process.file(fd)
    data = _readable(disk, file)[file.offset : file.offset + size]
    file.offset += len(data)
    return data


def pread(disk: Disk, process: Process, fd: int, size: int, offset: int) -> bytes:
    """pread."""
    return _readable(disk, process.file(fd))[offset : offset + size]


def _readable(disk: Disk, file: OpenFile) -> bytes:
    if file.flags & os.O_WRONLY:
        raise fail(errno.EBADF)
    disk.note_read(file.inode, WHOLE)
    return disk.file(file.inode).data


def write(disk: Disk, process: Process, fd: int, data: bytes) -> int:
    """write."""
    file = process.file(fd)
    if not file.flags & (os.O_WRONLY | os.O_RDWR):
        raise fail(errno.EBADF)
    disk.write(file.inode, file.offset, data, process.machine)
    file.offset += len(data)
    return len(data)


def fsync(disk: Disk, process: Process, fd: int) -> None:
    """fsync and fdatasync; fails if that was asked for."""
    inode = process.file(fd).inode
    if process.is_failing:
        process.is_failing = False
        disk.poison(inode)
        raise fail(errno.EIO)
    disk.sync(inode, process.machine)


def posix_fadvise(disk: Disk, process: Process, fd: int, *_: Any) -> None:
    """posix_fadvise: nothing that could be seen."""
    process.file(fd)


def flock(disk: Disk, process: Process, fd: int, operation: int) -> None:
    """flock, exclusive and without waiting."""
    file = process.file(fd)
    disk.note_write(file.inode, LOCK)
    if operation == fcntl.LOCK_UN:
        if process.locks.get(file.inode) is file:
            del process.locks[file.inode]
        return
    if operation != fcntl.LOCK_EX | fcntl.LOCK_NB:
        raise NotSimulated(f"flock with operation {operation}")
    if process.locks.setdefault(file.inode, file) is not file:
        raise fail(errno.EWOULDBLOCK)


_CHANGING = frozenset({mkdir, rmdir, unlink, rename, link, utime, write})
_READING = frozenset({stat_, fstat, listdir, read, pread})
_PRIVATE = frozenset({dup, posix_fadvise, fstatvfs})


def _is_opening(call: Call) -> bool:
    return call.effect is open_ and not call.args[1] & os.O_CREAT


def is_private(process: Process, call: Call) -> bool:
    """The order of this call and any call of another process makes no difference."""
    if call.effect is close:
        file = process.files.get(call.args[0])
        return file is None or process.locks.get(file.inode) is not file
    return call.effect in _PRIVATE


def is_read(call: Call) -> bool:
    """Its result depends on others, and it leaves no trace on the disk."""
    return call.effect in _READING or _is_opening(call)


def is_visible(call: Call) -> bool:
    """Others can see what it did, without a power cut."""
    return call.effect in _CHANGING or (call.effect is open_ and not _is_opening(call))
