"""A forked child that tells its parent what it does while it does it.

A fork that executes no program costs a millisecond, so hundreds fit into a test. It is safe from a
parent without threads (`tidegate_crash.kills_run` and `power_run` are such programs). Called by
`kills`, `kills_judge` and the campaigns.
"""

import gc
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from tidegate_ground import linux

_SIGNAL_AT_PARENTS_END = 1
"""PR_SET_PDEATHSIG of linux/prctl.h."""
Tell = Callable[[object], None]
"""Sends one record to the parent; it has arrived, whatever happens to the child afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A child's life as its parent heard it.

    Attributes:
        told: everything it told, in order.
        is_killed: it was ended by SIGKILL.
        defect: a traceback, or what else was wrong with its end; empty if nothing.
    """

    told: tuple[Any, ...]
    is_killed: bool
    defect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defect:
    text: str


class Child:
    """One forked process; `wait` must be called once."""

    def __init__(self, work: Callable[[Tell], None]) -> None:
        """Starts it."""
        reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reading)
            _live(writing, work)
        os.close(writing)
        self._told = os.fdopen(reading, "rb")

    def kill(self) -> None:
        """Ends it now, wherever it is; one that has ended stays as it is."""
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> Heard:
        """Waits for its end."""
        with self._told:
            told = list(_read_told(self._told))
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        defects = [record.text for record in told if isinstance(record, _Defect)]
        if code not in (0, -signal.SIGKILL) and not defects:
            defects.append(f"a process ended with {code}")
        return Heard(
            told=tuple(record for record in told if not isinstance(record, _Defect)),
            is_killed=code == -signal.SIGKILL,
            defect="\n".join(defects),
        )


def _read_told(stream: BinaryIO) -> Iterator[Any]:
    while True:
        try:
            yield pickle.load(stream)
        except (EOFError, pickle.UnpicklingError):  # it ended, perhaps in the middle of a record
            return


def _live(writing: int, work: Callable[[Tell], None]) -> None:
    gc.disable()  # a collection would copy the parent's memory, and the child is short-lived
    linux.LIBC.prctl(_SIGNAL_AT_PARENTS_END, signal.SIGKILL)
    code = 1
    with open(writing, "wb", buffering=0) as stream:

        def tell(record: object) -> None:
            stream.write(pickle.dumps(record))

        try:
            work(tell)
            code = 0
        except BaseException:  # noqa: BLE001  # a forked child must never return into the parent's code
            tell(_Defect(text=traceback.format_exc(limit=-2)))
        finally:
            os._exit(code)
