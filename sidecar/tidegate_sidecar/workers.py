"""The child that may touch the remote tier, and the ones that were given up. I/O.

The loop never waits here: a reader thread per child takes its messages, a child without progress is
killed and not waited for. A child in an uninterruptible sleep outlives its kill; such children are
counted, and above a cap no new one is started. Called from the loop's thread only.
"""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

from tidegate_sidecar.faults import Fault, Reason, Side, stalled
from tidegate_sidecar.tasks import Lane, Message, Places, Task
from tidegate_sidecar.view import RemoteView

MAX_LEAKED = 4
_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a task ended.

    Attributes:
        lane, task: which.
        view: the remote tier after it; None after a copy or a failure.
        copied_bytes: of a copy.
        seconds: it took.
        fault: None if it succeeded or was cancelled.
        is_cancelled: stopped on request, or because its child was given up for another task.
    """

    lane: Lane
    task: Task
    view: RemoteView | None = None
    copied_bytes: int = 0
    seconds: float = 0.0
    fault: Fault | None = None
    is_cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class _Running:
    task: Task
    started: float
    heard: float
    written: int = 0


class Workers:
    """Runs at most one task per lane in one child; replaces the child when it fails."""

    def __init__(self, places: Places, wake: Callable[[], None]) -> None:
        """Starts nothing yet; `wake` is called from other threads when there is news."""
        self._places = places
        self._wake = wake
        self._child: _Child | None = None
        self._running: dict[Lane, _Running] = {}
        self._given_up: list[subprocess.Popen[bytes]] = []

    @property
    def leaked(self) -> int:
        """Children that were killed and still exist."""
        self._given_up = [process for process in self._given_up if process.poll() is None]
        return len(self._given_up)

    @property
    def pid(self) -> int | None:
        """Of the child; None while there is none."""
        return self._child.process.pid if self._child else None

    def running(self, lane: Lane) -> Task | None:
        """The task of a lane; None while it is free."""
        found = self._running.get(lane)
        return found.task if found else None

    def written_bytes(self, lane: Lane) -> int:
        """Written so far by the task of a lane."""
        found = self._running.get(lane)
        return found.written if found else 0

    def can_start(self, lane: Lane) -> bool:
        """The lane is free, and a child is there or may be started."""
        return lane not in self._running and (self._child is not None or self.leaked < MAX_LEAKED)

    def start(self, lane: Lane, task: Task) -> None:
        """Gives a task to the child; only after `can_start`."""
        if self._child is None:
            self._child = _Child(self._places, self._wake)
        now = time.monotonic()
        self._running[lane] = _Running(task=task, started=now, heard=now)
        self._child.send((lane, task))

    def cancel_copy(self) -> None:
        """Asks the running copy to stop; its outcome tells when it has."""
        if self._child is not None:
            self._child.send(Lane.COPY)

    def collect(self, stall_seconds: float) -> list[Outcome]:
        """Outcomes since the last call.

        Args:
            stall_seconds: a task that showed no progress for so long is given up, with its child.
        """
        outcomes: list[Outcome] = []
        while self._child is not None:
            try:
                message = self._child.inbox.get_nowait()
            except Empty:
                break
            if message is None:
                outcomes += self._lose_child(_died(self._child.process.poll()))
            else:
                outcomes += self._take(message)
        now = time.monotonic()
        silent = [lane for lane, run in self._running.items() if now - run.heard > stall_seconds]
        if silent:
            outcomes += self._lose_child(stalled(stall_seconds), blamed=silent)
        return outcomes

    def _take(self, message: Message) -> list[Outcome]:
        run = self._running.get(message.lane)
        if run is None:
            return []
        run.heard = time.monotonic()
        if message.progress_bytes is not None:
            run.written += message.progress_bytes
            return []
        del self._running[message.lane]
        return [
            Outcome(
                lane=message.lane,
                task=run.task,
                view=message.view,
                copied_bytes=message.copied_bytes or 0,
                seconds=run.heard - run.started,
                fault=message.fault,
                is_cancelled=message.is_cancelled,
            )
        ]

    def _lose_child(self, fault: Fault, blamed: list[Lane] | None = None) -> list[Outcome]:
        lost = [
            Outcome(
                lane=lane,
                task=run.task,
                fault=fault if blamed is None or lane in blamed else None,
                is_cancelled=blamed is not None and lane not in blamed,
            )
            for lane, run in self._running.items()
        ]
        self.give_up()
        return lost

    def give_up(self) -> None:
        """Kills the child with all its handles; the next task gets a new one."""
        self._running.clear()
        if self._child is not None:
            self._given_up.append(self._child.kill())
            self._child = None

    def close(self) -> None:
        """Ends the child; waits for it for a moment only."""
        self.give_up()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for process in self._given_up:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


def _died(status: int | None) -> Fault:
    return Fault(
        side=Side.REMOTE,
        reason=Reason.STALLED,
        message=f"the copying process ended unexpectedly (status {status}); it is started again",
    )


class _Child:
    """One process and the threads that speak to it for the loop."""

    def __init__(self, places: Places, wake: Callable[[], None]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Spawned, never forked: a forked child in an endless sleep would keep the run's lock.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tidegate_sidecar.child", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.inbox: SimpleQueue[Message | None] = SimpleQueue()
        self._orders: SimpleQueue[object] = SimpleQueue()
        self._wake = wake
        self._socket = ours
        connection = Connection(os.dup(ours.fileno()))
        try:
            # A child stopped in the middle of a message blocks these threads, never the loop.
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()
            threading.Thread(target=self._write, args=(connection,), daemon=True).start()
        except RuntimeError as error:  # the limit of threads, or of memory: as no process to be had
            self.kill()
            raise OSError(errno.EAGAIN, str(error)) from error
        self.send(places)

    def send(self, order: object) -> None:
        self._orders.put(order)

    def kill(self) -> subprocess.Popen[bytes]:
        self._orders.put(None)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with self._socket, suppress(OSError):  # ends both threads, even if the child does not end
            self._socket.shutdown(socket.SHUT_RDWR)
        return self.process

    def _read(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    break
                self.inbox.put(message)
                if message.progress_bytes is None:
                    self._wake()
        self.inbox.put(None)
        self._wake()

    def _write(self, connection: Connection) -> None:
        while (order := self._orders.get()) is not None:
            try:
                connection.send(order)
            except OSError:
                return  # the reader tells the loop
