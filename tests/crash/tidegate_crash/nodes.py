"""The records that a disk is made of."""

import os
from typing import NamedTuple

Slot = tuple[int, str]
"""A directory's inode and a name in it."""
MASK = (1 << 64) - 1
WHOLE = ""
"""In a name's place: all that is in an inode."""
BYTES = "/bytes"
LOCK = "/lock"
END = "/end"
"""In a name's place: the inode's own properties. No name holds a slash."""


class File(NamedTuple):
    """A file. `durable` is None while nothing of it is; `writer` has not synced its bytes."""

    mode: int
    mtime: int
    device: int
    data: bytes
    durable: bytes | None
    writer: str
    is_poisoned: bool


class Directory(NamedTuple):
    """A directory; its dictionaries are never changed in place."""

    mode: int
    mtime: int
    device: int
    names: dict[str, int]
    durable: dict[str, int]
    is_gone: bool


class Change(NamedTuple):
    """A change of names that is not durable: `inode` left `source` and took `target`."""

    machine: str
    inode: int
    source: Slot | None
    target: Slot | None


class Fingerprint(NamedTuple):
    """Of all that can be seen by path: `content` alone, and with modification times."""

    content: int
    timed: int


def mixed(number: int) -> int:
    """A hash whose bits have nothing to do with those of similar ones, so that sums tell sets."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def fail(number: int) -> OSError:
    """The exception of an error number."""
    return OSError(number, os.strerror(number))


class Footprint:
    """What calls read and changed: an entry is an inode and a name or property."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        """Nothing yet."""
        self.reads: set[tuple[int, str]] = set()
        self.writes: set[tuple[int, str]] = set()

    def add(self, other: "Footprint") -> None:
        """As if one call had done both."""
        self.reads |= other.reads
        self.writes |= other.writes

    def conflicts(self, other: "Footprint") -> bool:
        """The order of the two may make a difference."""
        return self._disturbs(other) or other._disturbs(self)

    def _disturbs(self, other: "Footprint") -> bool:
        return any(
            entry in other.reads or entry in other.writes or (entry[0], WHOLE) in other.reads
            for entry in self.writes
        )
