"""One open directory and the system calls inside it: the seam below `publish` and `scan`.

Everything is relative to a descriptor that was opened once, so a late call of an earlier run lands
in the folder that was moved aside and never in its successor. Links are never followed. Every
method is a few system calls and raises OSError as the kernel gives it. One thread per instance.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

from tidegate_contract.document import MAX_BYTES
from tidegate_contract.errors import Corrupt
from tidegate_contract.layout import TRASH, temp_file

FOLDER_MODE = 0o2770
"""Set-group-ID, so that sidecar and agent of the tier's group may clean what the trainer made."""
FILE_MODE = 0o640
_RESERVATION = "0" * 16
_ABANDONED_SECONDS = 60.0
_NOT_A_FILE = frozenset({errno.ENXIO, errno.ENODEV})
"""Open of a socket, or of a device that nobody serves."""
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
ENTRY_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
"""What one entry of a shared file system may answer while the tier itself is well."""


class Folder:
    """An open directory; close it or use it as a context manager."""

    def __init__(self, fd: int, path: str) -> None:
        """Takes over an open directory descriptor; `path` is for messages only."""
        self._fd = fd
        self.path = path

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens an existing directory.

        Raises:
            OSError: it does not exist, is no directory, or cannot be read.
        """
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), os.fspath(path))

    @property
    def fd(self) -> int:
        """The descriptor; it belongs to this object."""
        return self._fd

    def close(self) -> None:
        """Closes the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the descriptor."""
        self.close()

    def child(self, name: str) -> "Folder":
        """Opens a directory inside this one, not through a link."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return Folder(os.open(name, flags, dir_fd=self._fd), f"{self.path}/{name}")

    def ensure_child(self, name: str) -> "Folder":
        """Opens a directory inside this one and makes it where it is missing; durable either way.

        One that was there is synced as well: its maker may have died before that, and whatever is
        put into it would go with its name in a power cut.
        """
        try:
            os.mkdir(name, FOLDER_MODE, dir_fd=self._fd)
        except FileExistsError:
            folder = self.child(name)
            self.sync()
            return folder
        folder = self.child(name)
        os.fchmod(folder.fd, FOLDER_MODE)  # mkdir's mode passed through the umask
        self.sync()
        return folder

    def below(self, parts: Iterable[str], *, makes: bool = False) -> "Folder":
        """Opens the folder at a path below this one, each part not through a link.

        Args:
            parts: names, outermost first; none gives this folder once more.
            makes: make what is missing, as `ensure_child` does.
        """
        folder = Folder(os.dup(self._fd), self.path)
        for part in parts:
            with folder as parent:
                folder = parent.ensure_child(part) if makes else parent.child(part)
        return folder

    def names(self) -> list[str]:
        """Names of all entries, sorted."""
        return sorted(os.listdir(self._fd))

    def size(self, name: str) -> int | None:
        """Bytes of a regular file; None where there is no such file.

        Raises:
            Corrupt: the name is a link, a device or a directory.
        """
        try:
            found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise Corrupt(f"{self.path}/{name}: not a regular file")
        return found.st_size

    def open_file(self, name: str) -> int:
        """A descriptor for reading a regular file, not through a link; the caller closes it.

        Raises:
            Corrupt: the name is a link or not a regular file.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Corrupt(f"{self.path}/{name}: a symbolic link") from error
            if error.errno in _NOT_A_FILE:
                raise Corrupt(f"{self.path}/{name}: not a regular file") from error
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Corrupt(f"{self.path}/{name}: not a regular file")
        return fd

    def read(self, name: str, limit: int = MAX_BYTES) -> bytes | None:
        """All bytes of a small file; None where there is no such file.

        Raises:
            Corrupt: not a regular file, or more than `limit` bytes.
        """
        try:
            fd = self.open_file(name)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            size = os.fstat(fd).st_size
            # not `limit` bytes: a read takes the memory that it asks for, whatever is there
            data = file.read(size + 1) if size <= limit else b""
            if len(data) > size:
                data += file.read(limit - size)  # it has grown
        if size > limit or len(data) > limit:
            raise Corrupt(f"{self.path}/{name}: over {limit} bytes")
        return data

    @contextmanager
    def new_file(self, final: str) -> Iterator["NewFile"]:
        """An unfinished file that takes the name `final` when `NewFile.publish` is called.

        Without that call, or on any error, the file is removed: an fsync that failed once is never
        tried again on the same file.
        """
        name = temp_file(final, secrets.token_hex(8))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = NewFile(self, os.open(name, flags, FILE_MODE, dir_fd=self._fd), name, final)
        try:
            yield file
        finally:
            file.discard()

    def rename(self, source: str, target: str, into: "Folder | None" = None) -> None:
        """Renames an entry, replacing the target; durable only after `sync`."""
        os.rename(source, target, src_dir_fd=self._fd, dst_dir_fd=(into or self)._fd)

    def link_new(self, source: str, target: str) -> bool:
        """Gives a finished file its final name unless that exists.

        Returns:
            False if the name was taken, or another caller is about to take it.
        """
        try:
            os.link(source, target, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            return self._reserve_and_rename(source, target)
        return True

    def _reserve_and_rename(self, source: str, target: str) -> bool:
        """Reserves under a name that no reader takes, so that a crash leaves no empty target.

        Only who made the reservation renames, as long as it lies there: one that is held up for
        long is taken for dead by others.
        """
        reserved = temp_file(target, _RESERVATION)
        if not self._reserve(reserved, source):
            is_free = self.size(target) is None and self._clear_abandoned(source, reserved)
            if not is_free or not self._reserve(reserved, source):
                return False
        try:
            if self.size(target) is not None or not self._holds(reserved, source):
                return False
            self.rename(source, target)
        finally:
            if self._holds(reserved, source):
                self.remove(reserved)
        return True

    def _reserve(self, reserved: str, source: str) -> bool:
        """Makes the reservation, which says whose it is; False if there is one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(reserved, flags, FILE_MODE, dir_fd=self._fd)
        except FileExistsError:
            return False
        try:
            os.write(fd, source.encode())
        finally:
            os.close(fd)
        return True

    def _holds(self, reserved: str, source: str) -> bool:
        # not by its inode: the number of one that was removed is soon another file's
        return self.read(reserved) == source.encode()

    def _clear_abandoned(self, source: str, reserved: str) -> bool:
        """Takes an abandoned reservation away; False if there is none.

        By a rename, so that a fresh one which came into its place is not unlinked unseen. It is not
        put back: its maker then gives up, where two might believe that they have the name.
        """
        if not self._is_abandoned(source, reserved):
            return False
        taken = temp_file(reserved, secrets.token_hex(8))
        try:
            self.rename(reserved, taken)
        except FileNotFoundError:
            return False
        is_abandoned = self._is_abandoned(source, taken)
        self.remove(taken)
        return is_abandoned

    def _is_abandoned(self, source: str, reserved: str) -> bool:
        """Its maker died in between: by the clock of the file system, which stamped both."""
        try:
            made = os.stat(reserved, dir_fd=self._fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return False
        now = os.stat(source, dir_fd=self._fd, follow_symlinks=False).st_mtime
        return now - made > _ABANDONED_SECONDS

    def remove(self, name: str) -> None:
        """Unlinks a file; a missing one is fine."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return

    def sync(self) -> None:
        """Makes names in this directory durable."""
        os.fsync(self._fd)


class NewFile:
    """A file under a temporary name; made by `Folder.new_file` only."""

    def __init__(self, folder: Folder, fd: int, name: str, final: str) -> None:
        """Takes over the descriptor."""
        self._folder = folder
        self.fd = fd
        self.name = name
        self._final = final

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Writes all of `data`; short writes are continued."""
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(self.fd, view) :]

    def publish(self, size: int, *, is_exclusive: bool = False) -> bool:
        """fsync, close, size check, final name, folder fsync: in this order, nothing skipped.

        Args:
            size: bytes that the file must have.
            is_exclusive: keep an existing file of the final name.

        Returns:
            False if the name was taken (`is_exclusive` only).

        Raises:
            OSError: from any of the calls; the final name is then as it was.
        """
        os.fsync(self.fd)
        fd, self.fd = self.fd, -1
        os.close(fd)
        found = self._folder.size(self.name)
        if found != size:
            raise OSError(errno.EIO, f"{self._final}: {found} bytes after close, {size} written")
        if is_exclusive:
            is_new = self._folder.link_new(self.name, self._final)
        else:
            self._folder.rename(self.name, self._final)
            is_new = True
        self._folder.sync()
        return is_new

    def discard(self) -> None:
        """Closes and removes what was not published."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
        self._folder.remove(self.name)


def open_step(run: Folder, folder: str) -> Folder:
    """Opens a step folder by the path that a scan gave, or where it was moved meanwhile.

    Retention moves steps into `.trash` and, after a rollback, out of it, while a job that has just
    chosen one opens it.

    Args:
        run: the run's folder; stays the caller's.
        folder: relative to the run's, as in `scan.StepRecord`.

    Raises:
        FileNotFoundError: it is in neither place.
        OSError: it cannot be opened.
    """
    name = folder.removeprefix(f"{TRASH}/")
    is_in_trash = name != folder
    for place in (is_in_trash, not is_in_trash, is_in_trash):
        try:
            if not place:
                return run.child(name)
            with run.child(TRASH) as trash:
                return trash.child(name)
        except FileNotFoundError:
            continue
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{run.path}/{folder}")
