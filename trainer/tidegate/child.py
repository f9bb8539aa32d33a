"""The flusher without a cluster: one process beside each node's first rank. Main thread only."""

import logging
import os
import subprocess
import sys

from tidegate.settings import Settings
from tidegate_contract import keys
from tidegate_contract.document import encode

_LOG = logging.getLogger(__name__)
_STOP_SECONDS = 10.0


class FlushChild:
    """A running `tidegate_sidecar flush` of this node."""

    def __init__(self, settings: Settings) -> None:
        """Starts it in a session of its own, so that it outlives a signal to the trainer's group.

        Args:
            settings: with a remote tier.
        """
        assert settings.remote is not None
        environment = {
            **os.environ,
            keys.ENV_RUN: settings.run,
            keys.ENV_LOCAL: str(settings.local.path),
            keys.ENV_REMOTE: str(settings.remote.path),
            keys.ENV_POLICY: encode(settings.policy).decode(),
            keys.ENV_PARENT: str(os.getpid()),
        }
        environment.pop(keys.ENV_GATE_URL, None)
        environment.setdefault(keys.ENV_METRICS_PORT, "0")  # several trainers may share a host
        command = [sys.executable, "-m", "tidegate_sidecar", "flush"]
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        _LOG.info("flusher started", extra={"run": settings.run, "pid": self._process.pid})

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Asks it to end and waits a little; what it has not copied stays on the local tier."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            _LOG.warning("flusher still copies; it is left alone", extra={"pid": self._process.pid})
