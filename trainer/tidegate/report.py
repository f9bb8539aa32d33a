"""Between trainer and sidecar: `state-<rank>.json` out, `control.json` in.

The state is written by a small daemon thread, on changes and as a heartbeat, so a long step is not
mistaken for a dead trainer. The control document is read by rank 0 only.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tidegate_contract.document import decode
from tidegate_contract.errors import TidegateError
from tidegate_contract.folder import Folder
from tidegate_contract.layout import CONTROL_DOCUMENT, state_file
from tidegate_contract.publish import write_document
from tidegate_contract.wire import Control, TrainerState

_LOG = logging.getLogger(__name__)
_HEARTBEAT_SECONDS = 3.0
_GAP_SECONDS = 0.5
"""Between two writes: at most two a second, whatever changes."""


class Reporter:
    """Writes one rank's state; `update` may be called from any thread."""

    def __init__(self, run_folder: str, state: TrainerState) -> None:
        """Starts with this state; nothing is written before `start`."""
        self._run_folder = run_folder
        self._state = state
        self._changed = threading.Condition()
        self._has_news = False
        self._is_ended = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="tidegate-state", daemon=True)
        self.on_beat: Callable[[], None] = lambda: None

    @property
    def state(self) -> TrainerState:
        """The newest state."""
        return self._state

    def start(self) -> None:
        """Begins to write."""
        self._has_news = True
        self._thread.start()

    def update(self, *, is_news: bool = True, **changes: Any) -> None:
        """Changes fields of the state.

        Args:
            is_news: write soon; False leaves it to the heartbeat.
            changes: fields of `TrainerState`.
        """
        with self._changed:
            self._state = replace(self._state, **changes)
            if is_news:
                self._has_news = True
                self._changed.notify_all()

    def stop(self) -> None:
        """Writes the last state and ends; waits for a slow disk only a little."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_HEARTBEAT_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._has_news or self._is_ended, timeout=_HEARTBEAT_SECONDS
                )
                self._has_news = False
                is_last = self._is_ended
                state = self._state
            self._write(replace(state, written_at=datetime.now(UTC)))
            if is_last:
                return
            self.on_beat()
            with self._changed:
                self._changed.wait_for(lambda: self._is_ended, timeout=_GAP_SECONDS)

    def _write(self, state: TrainerState) -> None:
        try:
            with Folder.open(self._run_folder) as folder:
                write_document(folder, state_file(state.rank), state)
        except OSError as error:
            if not self._is_failing:
                _LOG.warning("state is not written", extra={"error": str(error)})
            self._is_failing = True
        else:
            self._is_failing = False


class ControlReader:
    """Reads `control.json` when it has changed; one thread per instance."""

    def __init__(self, run_folder: str) -> None:
        """Opens the run's local folder."""
        self._folder = Folder.open(run_folder)
        self._seen: tuple[int, int, int] | None = None
        self._control = Control()

    def read(self) -> Control:
        """The newest control document; a default one until there is any.

        Costs one stat while nothing changes. A document that cannot be read is logged once and the
        previous one stays.
        """
        try:
            found = os.stat(CONTROL_DOCUMENT, dir_fd=self._folder.fd, follow_symlinks=False)
        except OSError:
            return self._control
        seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        if seen != self._seen:
            self._seen = seen
            self._control = self._load() or self._control
        return self._control

    def _load(self) -> Control | None:
        try:
            data = self._folder.read(CONTROL_DOCUMENT)
            return decode(Control, data, CONTROL_DOCUMENT) if data is not None else None
        except (OSError, TidegateError) as error:
            _LOG.warning("control document was not read", extra={"error": str(error)})
            return None

    def close(self) -> None:
        """Closes the folder."""
        self._folder.close()
