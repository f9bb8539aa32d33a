"""One flusher per run and node: an flock on the run's folder on the local tier. I/O.

The kernel frees the lock when its holder dies, at whatever byte. Children do not inherit it.
"""

import fcntl
import os

from tidegate_contract.folder import Folder
from tidegate_contract.layout import LOCK_FILE

_MODE = 0o660
"""Sidecars of other users and the agent, all of the tier's group, compete for it."""


class FlushLock:
    """The lock of one run on this node; one thread at a time."""

    def __init__(self, run: Folder) -> None:
        """Takes nothing yet; `run` stays the caller's."""
        self._run = run
        self._fd = -1

    @property
    def is_held(self) -> bool:
        """This process is the flusher."""
        return self._fd >= 0

    def try_take(self) -> bool:
        """Takes the lock if it is free; True as well if it is held already.

        Raises:
            OSError: the file cannot be made or opened.
        """
        if self.is_held:
            return True
        fd = _open(self._run)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        if not _is_current(self._run, fd):  # someone moved the file: this lock binds nobody
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        """Gives the lock back; a second call does nothing."""
        if self.is_held:
            os.close(self._fd)
            self._fd = -1


def _open(run: Folder) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(LOCK_FILE, flags, dir_fd=run.fd)
    except FileNotFoundError:
        fd = os.open(LOCK_FILE, flags | os.O_CREAT, _MODE, dir_fd=run.fd)
    if os.fstat(fd).st_uid == os.geteuid():
        os.fchmod(fd, _MODE)  # whatever the umask
    return fd


def _is_current(run: Folder, fd: int) -> bool:
    try:
        named = os.stat(LOCK_FILE, dir_fd=run.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))
