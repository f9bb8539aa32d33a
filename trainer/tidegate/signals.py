"""SIGTERM: the first asks all ranks to stop together, the second ends this process at once."""

import atexit
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

from tidegate_contract.keys import EXIT_TERMINATED

_LOG = logging.getLogger(__name__)


class _Exit:
    """Ends the process with 143 before the native libraries are torn down.

    With a peer already gone, gloo's threads may abort the process there, and a rank that has saved
    and left would count as crashed. Made at import, so that it runs after every exit function that
    a program registers later.
    """

    def __init__(self) -> None:
        self.is_terminated = False
        atexit.register(self._end)

    def _end(self) -> None:
        # An uncaught exception after `leave` is the program's failure and keeps its status.
        if self.is_terminated and getattr(sys, "last_value", None) is None:
            sys.stdout.flush()
            sys.stderr.flush()
            logging.shutdown()
            os._exit(EXIT_TERMINATED)


_EXIT = _Exit()


def leave() -> NoReturn:
    """Ends this rank with status 143; the program's own `finally` and exit functions still run.

    Raises:
        SystemExit: always.
    """
    _EXIT.is_terminated = True
    raise SystemExit(EXIT_TERMINATED)


class Termination:
    """Whether this process was asked to end."""

    def __init__(self) -> None:
        """Nothing is installed yet."""
        self.is_asked = False
        self._previous: Any = None
        self._is_installed = False

    def install(self) -> None:
        """Takes SIGTERM over; only the main thread of a process may, elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            _LOG.warning("SIGTERM is not watched outside the main thread")
            return
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        self._is_installed = True

    def uninstall(self) -> None:
        """Puts the previous handler back."""
        if self._is_installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
            self._is_installed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            os._exit(EXIT_TERMINATED)  # an exception could be swallowed by whatever runs now
        self.is_asked = True
