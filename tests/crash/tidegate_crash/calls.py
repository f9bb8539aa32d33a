"""What stands in for `os`, `fcntl` and `secrets` inside production code.

Each call that touches files becomes a call of the running simulated process; constants and what
asks no file system are the real ones; anything else raises `NotSimulated` and names what is
missing, so that production cannot leave the layer unseen.
"""

import fcntl
import os
import secrets
import time
import uuid
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any, Self

from tidegate_crash import effects
from tidegate_crash.process import NotSimulated, Process, World

_CONSTANTS = ("O_", "POSIX_FADV_", "LOCK_", "SEEK_")
_PURE = frozenset(
    {
        *("UUID", "PathLike", "fsdecode", "fspath", "path", "strerror"),
        *("getegid", "geteuid", "getgid", "getuid"),
    }
)


class _StandIn:
    """A module of which only some names are left as they are."""

    def __init__(self, module: ModuleType, world: World) -> None:
        self._name = module.__name__
        self._world = world
        self._call = world.call
        for name in dir(module):
            if name.startswith(_CONSTANTS) or name in _PURE:
                setattr(self, name, getattr(module, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSimulated(f"{self._name}.{name} is not simulated")

    def _running(self) -> Process:
        if self._world.process is None:
            raise NotSimulated(f"{self._name}: no simulated process runs")
        return self._world.process


class SimulatedFile:
    """What `os.fdopen` returns; one read is one call."""

    def __init__(self, os_: "SimulatedOs", fd: int) -> None:
        self._os = os_
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def read(self, size: int = -1) -> bytes:
        return self._os.read(self._fd, size if size >= 0 else 1 << 62)

    def readinto(self, buffer: Any) -> int:
        return self._os.readv(self._fd, [buffer])

    def write(self, data: Any) -> int:
        return self._os.write(self._fd, data)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


class SimulatedOs(_StandIn):
    """The module `os`."""

    def __init__(self, world: World) -> None:
        super().__init__(os, world)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd: int = self._call("open", effects.open_, os.fspath(path), flags, mode, dir_fd)
        return fd

    def close(self, fd: int) -> None:
        self._call("close", effects.close, fd)

    def dup(self, fd: int) -> int:
        other: int = self._call("dup", effects.dup, fd)
        return other

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._call("mkdir", effects.mkdir, os.fspath(path), mode, dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._call("rmdir", effects.rmdir, os.fspath(path), dir_fd)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._call("unlink", effects.unlink, os.fspath(path), dir_fd)

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        paths = os.fspath(src), os.fspath(dst)
        self._call("rename", effects.rename, *paths, src_dir_fd, dst_dir_fd)

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        paths = os.fspath(src), os.fspath(dst)
        self._call("link", effects.link, *paths, src_dir_fd, dst_dir_fd)

    def stat(
        self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True
    ) -> effects.Stat:
        if isinstance(path, int):
            return self.fstat(path)
        found: effects.Stat = self._call("stat", effects.stat_, os.fspath(path), dir_fd)
        return found

    def fstat(self, fd: int) -> effects.Stat:
        found: effects.Stat = self._call("fstat", effects.fstat, fd)
        return found

    def fstatvfs(self, fd: int) -> effects.StatVfs:
        found: effects.StatVfs = self._call("fstatvfs", effects.fstatvfs, fd)
        return found

    def listdir(self, path: int) -> list[str]:
        if not isinstance(path, int):
            raise NotSimulated(f"os.listdir of the path {path}")
        return list(self._call("listdir", effects.listdir, path))

    def utime(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        self._call("utime", effects.utime, path, dir_fd)

    def fchmod(self, fd: int, mode: int) -> None:
        self._call("fchmod", effects.fchmod, fd, mode)

    def fchown(self, fd: int, uid: int, gid: int) -> None:
        self._call("fchown", effects.fchown, fd, uid, gid)

    def read(self, fd: int, size: int) -> bytes:
        data: bytes = self._call("read", effects.read, fd, size)
        return data

    def readv(self, fd: int, buffers: Sequence[Any]) -> int:
        (buffer,) = buffers
        data = self.read(fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        data: bytes = self._call("pread", effects.pread, fd, size, offset)
        return data

    def write(self, fd: int, data: Any) -> int:
        count: int = self._call("write", effects.write, fd, bytes(data))
        return count

    def fsync(self, fd: int) -> None:
        self._call("fsync", effects.fsync, fd)

    def fdatasync(self, fd: int) -> None:
        self._call("fdatasync", effects.fsync, fd)

    def posix_fadvise(self, fd: int, offset: int, length: int, advice: int) -> None:
        self._call("posix_fadvise", effects.posix_fadvise, fd, offset, length, advice)

    def fdopen(self, fd: int, mode: str = "r", buffering: int = -1) -> SimulatedFile:
        if mode != "rb":
            raise NotSimulated(f"os.fdopen with mode {mode}")
        return SimulatedFile(self, fd)


class SimulatedFcntl(_StandIn):
    """The module `fcntl`."""

    def __init__(self, world: World) -> None:
        super().__init__(fcntl, world)

    def flock(self, fd: int, operation: int) -> None:
        self._call("flock", effects.flock, fd, operation)


class SimulatedSecrets(_StandIn):
    """The module `secrets`: tokens that no two processes share, the same in every run."""

    def __init__(self, world: World) -> None:
        super().__init__(secrets, world)

    def token_hex(self, size: int) -> str:
        process = self._running()
        process.tokens += 1
        return f"{process.number:x}{process.tokens:0{size * 2 - 1}x}"


class SimulatedTime(_StandIn):
    """The module `time`: the steady clock, which stands still while a phase lasts."""

    def __init__(self, world: World) -> None:
        super().__init__(time, world)

    def monotonic(self) -> float:
        return self._running().disk.now / 1e9


class SimulatedUuid(_StandIn):
    """The module `uuid`."""

    def __init__(self, world: World) -> None:
        super().__init__(uuid, world)

    def uuid4(self) -> uuid.UUID:
        process = self._running()
        process.tokens += 1
        return uuid.UUID(int=(process.number << 64) + process.tokens)
