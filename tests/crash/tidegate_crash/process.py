"""A simulated process: descriptors, locks, counters, and the one door to its disk.

Its work is ordinary code on the interpreter's stack. Every call goes through `World.call`; once the
process is dead that raises `Killed`, a BaseException, so that no cleanup of the dead reaches the
disk.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tidegate_crash.disk import Disk
from tidegate_crash.nodes import fail

_INODES_EACH = 1 << 20


class Killed(BaseException):
    """This process does not exist any more; its stack is unwound without a trace."""


class NotSimulated(BaseException):
    """Production made a call that the disk does not know; the layer would have been left."""


@dataclass(slots=True, eq=False)
class OpenFile:
    """An open file description: shared by duplicated descriptors, owner of an flock."""

    inode: int
    flags: int
    offset: int = 0
    references: int = 1


@dataclass(slots=True)
class Call:
    """A call about to be made: `effect(disk, process, *args)`."""

    name: str
    effect: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Process:
    """One process.

    Attributes:
        name: for people.
        machine: whose power cut ends it.
        number: unique among the processes of a disk's life; its inodes are numbered by it.
        disk: where its calls take effect.
        locks: inode → open file that holds the lock; shared by all processes of a run.
        gate: called before each call; None lets it run.
        trail: hash of all results so far; what a sequential process does next depends on no more.
        pending: the call in flight.
        is_dead: makes no calls any more.
        is_failing: its next sync fails.
    """

    name: str
    machine: str
    number: int
    disk: Disk
    locks: dict[int, OpenFile] = field(default_factory=dict)
    gate: Callable[["Process"], None] | None = None
    files: dict[int, OpenFile] = field(default_factory=dict)
    trail: int = 0
    tokens: int = 0
    pending: Call | None = None
    is_dead: bool = False
    is_failing: bool = False
    _inodes: int = 0
    _next: int = 3

    def new_inode(self) -> int:
        """A number that does not depend on what other processes did."""
        self._inodes += 1
        return (self.number + 1) * _INODES_EACH + self._inodes

    def add(self, file: OpenFile) -> int:
        """The descriptor of a file just opened."""
        self._next += 1
        self.files[self._next] = file
        return self._next

    def file(self, descriptor: int) -> OpenFile:
        """The open file of a descriptor; EBADF if there is none."""
        try:
            return self.files[descriptor]
        except KeyError:
            raise fail(errno.EBADF) from None

    def close(self, descriptor: int) -> None:
        """Closes a descriptor; the last one of an open file gives its lock back."""
        file = self.file(descriptor)
        del self.files[descriptor]
        file.references -= 1
        if file.references == 0 and self.locks.get(file.inode) is file:
            del self.locks[file.inode]

    def die(self) -> None:
        """The kernel closes everything; the call in flight stays known."""
        self.is_dead = True
        for descriptor in list(self.files):
            self.close(descriptor)

    def ghost(self, disk: Disk) -> "Process":
        """A process on another disk with the same descriptors, whose one call arrives late."""
        files = {
            number: OpenFile(file.inode, file.flags, file.offset)
            for number, file in self.files.items()
        }
        return Process(
            name=self.name,
            machine=self.machine,
            number=self.number,
            disk=disk,
            files=files,
            _inodes=self._inodes,
            _next=self._next,
        )

    @property
    def holds_lock(self) -> bool:
        """One of its files is locked."""
        return any(self.locks.get(file.inode) is file for file in self.files.values())


class World:
    """Who runs now. Exactly one process runs at a time, whatever thread it is on."""

    def __init__(self) -> None:
        """Nobody runs."""
        self.process: Process | None = None

    def call(self, name: str, effect: Callable[..., Any], *args: Any) -> Any:
        """Makes a call of the running process.

        Raises:
            OSError: what the kernel would say.
            Killed: the process is dead, or dies now.
        """
        process = self.process
        if process is None:
            raise NotSimulated(f"{name}: no simulated process runs")
        if process.is_dead:
            raise Killed
        if process.gate is None:
            return effect(process.disk, process, *args)
        process.pending = Call(name, effect, args)
        process.gate(process)
        try:
            result = effect(process.disk, process, *args)
        except OSError as error:
            process.trail = hash((process.trail, name, error.errno))
            raise
        process.trail = hash((process.trail, name, result))
        return result

    def run(self, process: Process, work: Callable[[], None]) -> None:
        """Runs work as a process that nothing interrupts, inside whatever runs now."""
        before, self.process = self.process, process
        try:
            work()
        finally:
            self.process = before
