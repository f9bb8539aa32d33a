"""The process that touches the remote tier: `python -m tidegate_sidecar.child FD`.

Started and spoken to by `workers`; ends when its parent does. It holds no lock.
"""

import os
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import assert_never

from tidegate_contract.errors import TidegateError
from tidegate_sidecar.faults import RemoteDamaged, SourceError, fault_of
from tidegate_sidecar.memory import take_rest
from tidegate_sidecar.tasks import (
    Announce,
    CommitNow,
    CopyRanks,
    Lane,
    Look,
    Message,
    Places,
    RemoteTier,
    Retain,
    Task,
)
from tidegate_sidecar.transfer import Cancelled, Meter, TokenBucket

_COPY_STACK_BYTES = 1 << 20
"""Of the threads that copy: they parse nothing, and what is reserved counts as taken."""


class Child:
    """Runs one task per lane at a time and tells of each; ends with its parent."""

    def __init__(self, connection: Connection) -> None:
        """Takes over the connection."""
        self._connection = connection
        self._sending = threading.Lock()
        self._tiers: dict[Lane, RemoteTier] = {}
        self._places: Places | None = None
        self._queues: dict[Lane, SimpleQueue[Task]] = {lane: SimpleQueue() for lane in Lane}
        self._cancel = threading.Event()
        self._bucket = TokenBucket(None)
        self._rate: int | None = None

    def serve(self) -> None:
        """Reads orders until the parent is gone."""
        for lane in Lane:
            threading.Thread(target=self._work, args=(lane,), name=lane, daemon=True).start()
        threading.stack_size(_COPY_STACK_BYTES)
        while True:
            try:
                order = self._connection.recv()
            except (EOFError, OSError):
                return
            if isinstance(order, Places):
                self._places = order
            elif isinstance(order, Lane):
                self._cancel.set()
            else:
                lane, task = order
                if lane is Lane.COPY:
                    self._cancel.clear()
                self._queues[lane].put(task)

    def _work(self, lane: Lane) -> None:
        while True:
            task = self._queues[lane].get()
            try:
                answer = self._run(lane, task)
            except Cancelled:
                answer = Message(lane=lane, is_cancelled=True)
            except (OSError, TidegateError, SourceError, RemoteDamaged) as error:
                answer = Message(lane=lane, fault=fault_of(error))
            except Exception as error:  # noqa: BLE001  # a defect must not look like a hang
                answer = Message(lane=lane, fault=fault_of(error))
            self._tell(answer)

    def _run(self, lane: Lane, task: Task) -> Message:
        def tick(size: int = 0) -> None:
            self._tell(Message(lane=lane, progress_bytes=size))

        tier = self._tier(lane)
        match task:
            case CopyRanks():
                meter = Meter(self._bucket_of(task.bytes_per_second), self._cancel, tick)
                return Message(lane=lane, copied_bytes=tier.copy(task, meter))
            case Announce(attempt=attempt, ranks=ranks):
                tier.announce(attempt, ranks)
            case CommitNow(attempt=attempt, now=now):
                tier.commit(attempt, now)
            case Retain(plan=plan):
                tier.retain(plan, tick)
            case Look():
                pass
            case _:
                assert_never(task)
        return Message(lane=lane, view=tier.look(tick))

    def _tier(self, lane: Lane) -> RemoteTier:
        """Handles of its own for each lane: a folder belongs to one thread."""
        if lane not in self._tiers:
            assert self._places is not None
            self._tiers[lane] = RemoteTier(self._places)
        return self._tiers[lane]

    def _bucket_of(self, rate: int | None) -> TokenBucket:
        if rate != self._rate:
            self._bucket, self._rate = TokenBucket(rate), rate
        return self._bucket

    def _tell(self, message: Message) -> None:
        with self._sending:
            try:
                self._connection.send(message)
            except OSError:
                os._exit(0)  # the parent is gone, and with it the lock: someone else goes on


def main() -> None:
    """Serves the connection whose descriptor is the one argument."""
    os.umask(0o007)
    take_rest()
    Child(Connection(int(sys.argv[1]))).serve()
    os._exit(0)  # threads may hang on the remote tier


if __name__ == "__main__":
    main()
