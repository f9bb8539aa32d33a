"""One flusher per run and node: an flock on the run's folder on the local tier. I/O.

The folder itself is locked, not a file in it: that needs no write, so that a full or read-only tier
can still be emptied, and nothing a tenant puts into the folder stands in the way. The kernel frees
the lock when its holder dies, at whatever byte. Children do not inherit it.
"""

import fcntl
import os

from tidegate_contract.folder import Folder


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
            OSError: the folder cannot be opened or locked.
        """
        if self.is_held:
            return True
        # An open of its own: a lock belongs to one, and `run` is the caller's.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._run.fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._fd = fd
        return True

    def release(self) -> None:
        """Gives the lock back; a second call does nothing."""
        if self.is_held:
            os.close(self._fd)
            self._fd = -1
