"""Saves in flight on this rank: snapshot on the main thread, writing on a daemon thread.

The list of saves in flight is the same on all ranks, because it changes only with what the
agreement says. A writer that hangs keeps its slot and its thread; a new thread takes the next save.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from tidegate.planner import NodePlanner
from tidegate.safe_load import warn_of_unsafe
from tidegate.staging import Ring, Slot
from tidegate.writer import Desk, Ticket, write_attempt

_LOG = logging.getLogger(__name__)


_IDLE_WRITER_SECONDS = 2.0


class Stage(StrEnum):
    """How far this rank is with a save."""

    RUNNING = "Running"
    SEALED = "Sealed"
    FAILED = "Failed"


@dataclass(slots=True, kw_only=True)
class Save:
    """One save on this rank; written by its thread until `ended` is set.

    Attributes:
        ticket: the attempt.
        pause_ms: the main thread stood still for its snapshot.
        started: monotonic time of its begin.
        stage, error: the outcome, valid once `ended` is set.
        is_group_broken: the saving group must be made anew.
        seal_ms: from its begin until the seal.
        size_bytes: sealed by this rank.
    """

    ticket: Ticket
    pause_ms: float = 0.0
    started: float
    stage: Stage = Stage.RUNNING
    error: str = ""
    is_group_broken: bool = False
    seal_ms: float = 0.0
    size_bytes: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, stage: Stage, error: str = "", *, is_group_broken: bool = False) -> None:
        """Sets the outcome unless there is one: the first of thread and supervisor wins."""
        if self.ended.is_set():
            return
        self.stage, self.error, self.is_group_broken = stage, error, is_group_broken
        self.seal_ms = (time.monotonic() - self.started) * 1000
        self.ended.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    save: Save
    slot: Slot
    entries: dict[str, Any]
    planner: NodePlanner


class _Writer(threading.Thread):
    """Writes orders in turn with one process group. A daemon, so a hung disk holds no exit up."""

    def __init__(self, desk: Desk, group: Any, ring: Ring) -> None:
        super().__init__(name="tidegate-writer", daemon=True)
        self._desk = desk
        self._group = group
        self._ring = ring
        self.orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (order := self.orders.get()) is not None:
            try:
                self._write(order)
            finally:
                self._ring.give_back(order.slot)

    def _write(self, order: _Order) -> None:
        save = order.save
        try:
            save.size_bytes = write_attempt(
                self._desk, save.ticket, order.entries, order.planner, self._group
            )
        except CheckpointException as error:  # a BaseException; the group is still usable
            save.end(Stage.FAILED, _first_failure(error))
        except Exception as error:  # noqa: BLE001  # a failed save never ends training
            save.end(Stage.FAILED, f"{type(error).__name__}: {error}", is_group_broken=True)
        else:
            save.end(Stage.SEALED)


def _first_failure(error: Any) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"


class Saves:
    """The saves of this rank; main thread only."""

    def __init__(self, desk: Desk, group: Any, *, slots: int, timeout_seconds: float) -> None:
        """Starts the writer thread.

        Args:
            desk: this trainer.
            group: gloo group that only writer threads use.
            slots: snapshots in host memory.
            timeout_seconds: a save that takes longer has failed.
        """
        self._desk = desk
        self._ring = Ring(slots)
        self.timeout_seconds = timeout_seconds
        self._in_flight: deque[Save] = deque()
        self._writer = self._start_writer(group)
        self._is_vetted = desk.rank != 0  # one rank tells it

    def _start_writer(self, group: Any) -> _Writer:
        writer = _Writer(self._desk, group, self._ring)
        writer.start()
        return writer

    @property
    def in_flight(self) -> int:
        """Saves whose outcome the ranks have not agreed."""
        return len(self._in_flight)

    @property
    def has_free_slot(self) -> bool:
        """A save could begin on this rank."""
        return self._ring.has_free

    def wait_free_slot(self) -> bool:
        """Waits for a slot, at most the save timeout."""
        return self._ring.wait_free(self.timeout_seconds)

    def warm(self, capture: Callable[[], dict[str, Any]]) -> None:
        """Makes the first save as quick as the others; after the first optimizer step only."""
        try:
            self._ring.warm(capture())
        except Exception as error:  # noqa: BLE001  # objects of the user's program are copied here
            _LOG.warning("the first save will be slow", extra={"error": repr(error)})

    def begin(self, ticket: Ticket, capture: Callable[[], dict[str, Any]]) -> None:
        """Takes the snapshot and hands it to the writer; a slot must be free.

        A snapshot that fails becomes a failed save on all ranks.
        """
        save = Save(ticket=ticket, started=time.monotonic())
        slot = self._ring.take()
        entries: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            entries = slot.copy(capture())
        except Exception as error:  # noqa: BLE001  # objects of the user's program are copied here
            failure = error
        else:
            self._vet(entries)
        save.pause_ms = (time.monotonic() - save.started) * 1000
        planner = NodePlanner(self._desk.topology, failure)
        self._in_flight.append(save)
        self._writer.orders.put(_Order(save=save, slot=slot, entries=entries, planner=planner))

    def _vet(self, entries: dict[str, Any]) -> None:
        """Of the first snapshot, not of each: what a program keeps is of the same types later."""
        if not self._is_vetted:
            self._is_vetted = True
            warn_of_unsafe(entries)

    def oldest(self) -> Save | None:
        """The save whose outcome is agreed next; one that is overdue has failed."""
        if not self._in_flight:
            return None
        save = self._in_flight[0]
        if time.monotonic() - save.started > self.timeout_seconds:
            self._give_up(save)
        return save

    def wait_oldest(self) -> None:
        """Waits until the oldest save has ended on this rank, at most until it is overdue."""
        save = self.oldest()
        if save is None:
            return
        left = save.started + self.timeout_seconds - time.monotonic()
        if not save.ended.wait(max(left, 0.0)):
            self._give_up(save)

    def wait_all(self) -> None:
        """Waits until every save has ended on this rank; for a rank that goes on alone."""
        for save in self._in_flight:
            left = save.started + self.timeout_seconds - time.monotonic()
            save.ended.wait(max(left, 0.0))

    def _give_up(self, save: Save) -> None:
        sentence = f"not sealed within {self.timeout_seconds:.0f} s"
        save.end(Stage.FAILED, sentence, is_group_broken=True)

    def settle(self) -> Save:
        """Removes the oldest save: all ranks have told its outcome."""
        return self._in_flight.popleft()

    def restart(self, group: Any) -> list[Save]:
        """Gives every save in flight up and goes on with a new thread and group, on all ranks.

        Returns:
            The saves that were given up, oldest first.
        """
        given_up = list(self._in_flight)
        self._in_flight.clear()
        for save in given_up:
            save.end(Stage.FAILED, "the saving group was made anew")
        self._writer.orders.put(None)
        self._writer = self._start_writer(group)
        return given_up

    def stop(self) -> None:
        """Ends the writer thread; one that writes is left alone, an idle one is waited for.

        A thread that is inside a native call while the interpreter ends may abort the process.
        """
        self._writer.orders.put(None)
        if not self._in_flight:
            self._writer.join(_IDLE_WRITER_SECONDS)
