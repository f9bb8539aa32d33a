"""Runs an actor in a real process and ends it at a chosen file system call.

The actor's calls of the module `os` are counted in that process alone; it ends itself instead of
the one that was asked for, by SIGKILL, so nothing of Python cleans up. What it promised reaches the
parent in the moment it is promised. Called by the campaigns in `kills_run` and `power_run`.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tidegate_contract import folder
from tidegate_contract.errors import TidegateError
from tidegate_contract.folder import NewFile
from tidegate_contract.layout import Attempt
from tidegate_crash.kills_child import Child, Tell
from tidegate_crash.scenario import Actor, Fact, History, Place
from tidegate_sidecar.faults import RemoteDamaged, SourceError

CALLS = (
    *("open", "close", "dup", "read", "readv", "pread", "write", "truncate", "ftruncate"),
    *("fsync", "fdatasync", "posix_fadvise", "stat", "fstat", "fstatvfs", "listdir", "scandir"),
    *("rename", "replace", "link", "symlink", "unlink", "rmdir", "mkdir"),
    *("utime", "fchmod", "fchown"),
)
"""File system calls of the module `os`."""
RAISED = (OSError, TidegateError, SourceError, RemoteDamaged)
"""What production may raise when a disk fails; whether it was right to, the disk tells."""
SYNCS = ("fsync", "fdatasync")
THE_END = "the end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """What happens at one call of an actor.

    Attributes:
        at: the how-manieth call, from 1; one more than it makes is `THE_END`, where all that it
            promised stands.
        fall: called before that call has any effect.
        is_fatal: the process ends there, a write after half of its bytes; else the call is made
            and the process goes on with what `fall` left.
    """

    at: int
    fall: Callable[[], None] = lambda: None
    is_fatal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an actor's process ended.

    Attributes:
        history: what it knew and what it promised.
        is_killed: by SIGKILL.
        calls: names of those that it made, and `THE_END`; empty if it was killed.
        defect: what went wrong that never may, whatever happened to the disk; empty if nothing.
        struck: the call at which the trigger went off; empty if it did not.
    """

    history: History
    is_killed: bool
    calls: tuple[str, ...]
    defect: str
    struck: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promised:
    kind: Fact
    attempt: Attempt | None
    number: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Complained:
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Struck:
    call: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    calls: tuple[str, ...] = ()


class _ToldHistory(History):
    """A history whose every promise is told to another process at once."""

    __slots__ = ("_tell",)

    def __init__(self, known: History, tell: Tell) -> None:
        super().__init__(known.notes, known.complaints)
        self._tell = tell

    def note(self, kind: Fact, attempt: Attempt | None = None, number: int | None = None) -> None:
        super().note(kind, attempt, number)
        self._tell(_Promised(kind=kind, attempt=attempt, number=number))

    def complain(self, sentence: str) -> None:
        super().complain(sentence)
        self._tell(_Complained(sentence=sentence))


class Process:
    """One actor at work in a process of its own; `wait` must be called once."""

    def __init__(
        self,
        actor: Actor,
        place: Place,
        known: History,
        trigger: Trigger | None = None,
        plant: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts it.

        Args:
            actor: its work.
            place: where.
            known: what was promised before.
            trigger: ends or disturbs it; None lets it run.
            plant: called first in that process, to change how production behaves there.
        """

        def work(tell: Tell) -> None:
            calls = _Calls(trigger, tell)
            plant()
            calls.install()
            with suppress(*RAISED):
                actor(place, _ToldHistory(known, tell))
            tell(_Done(calls=(*calls.made, THE_END)))
            calls.end()

        self._known = known
        self._child = Child(work)

    def kill(self) -> None:
        """Ends it now, wherever it is; one that has ended stays as it is."""
        self._child.kill()

    def wait(self) -> Ended:
        """Waits for its end."""
        heard = self._child.wait()
        history = self._known.copy()
        done, struck = _Done(), ""
        for record in heard.told:
            match record:
                case _Promised():
                    history.note(record.kind, record.attempt, record.number)
                case _Complained():
                    history.complain(record.sentence)
                case _Struck():
                    struck = record.call
                case _Done():
                    done = record
        return Ended(
            history=history,
            is_killed=heard.is_killed,
            calls=done.calls,
            defect=heard.defect,
            struck=struck,
        )


def leave_out(calls: Iterable[str]) -> None:
    """Makes calls of the module `os` do nothing, for the rest of this process."""
    for name in calls:
        setattr(os, name, lambda *_args, **_kwargs: None)


def write_in_place() -> None:
    """Makes production write files under their final names, for the rest of this process."""
    folder.temp_file = lambda final, _token: final  # type: ignore[assignment,attr-defined]
    real = NewFile.publish

    def publish(file: NewFile, size: int, *, is_exclusive: bool = False) -> bool:
        is_new = real(file, size, is_exclusive=is_exclusive)
        file.name = "nothing to be removed"
        return is_new

    NewFile.publish = publish  # type: ignore[assignment,method-assign]


class _Calls:
    """Counts this process's file system calls, of all its threads, and pulls the trigger."""

    def __init__(self, trigger: Trigger | None, tell: Tell) -> None:
        self._trigger = trigger
        self._tell = tell
        self._lock = threading.Lock()
        self.made: list[str] = []

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            trigger = self._next(name)
            if trigger is not None:
                if name == "write" and trigger.is_fatal:
                    real(args[0], args[1][: len(args[1]) // 2])
                self._strike(trigger, name)
            return real(*args, **kwargs)

        return call

    def end(self) -> None:
        """The actor is done; this may be what the trigger waits for."""
        trigger = self._next(THE_END)
        if trigger is not None:
            self._strike(trigger, THE_END)

    def _next(self, name: str) -> Trigger | None:
        with self._lock:
            self.made.append(name)
            is_due = self._trigger is not None and len(self.made) == self._trigger.at
        return self._trigger if is_due else None

    def _strike(self, trigger: Trigger, call: str) -> None:
        self._tell(_Struck(call=call))
        trigger.fall()
        if trigger.is_fatal:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # nothing more may reach the disk
