"""One writer at a time: an flock on a folder, which leaves no lock file behind."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(folder: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds the folder's lock; waits for whoever holds it. The kernel frees it with its owner.

    Args:
        folder: what is locked; it must be there.
        on_wait: called once, before waiting, when somebody else holds it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
