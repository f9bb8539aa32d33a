"""A queue of keys: each key is in it once, at the earliest time asked for, and never twice at work.

Owns order and time; knows nothing of what the keys stand for. One event loop.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple


class Subject(StrEnum):
    """What a key stands for."""

    RUN = "run"
    POLICY = "policy"
    NODE = "node"
    INSTALLATION = "installation"


class Item(NamedTuple):
    """One thing to reconcile."""

    subject: Subject
    namespace: str = ""
    name: str = ""


class Queue:
    """Keys that are due now or later."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins empty; `clock` gives monotonic seconds."""
        self._clock = clock
        self._due: dict[Item, float] = {}
        self._heap: list[tuple[float, int, Item]] = []
        self._order = itertools.count()
        self._working: dict[Item, float] = {}
        self._changed = asyncio.Event()

    @property
    def depth(self) -> int:
        """Keys that are due and not yet taken."""
        now = self._clock()
        return sum(due <= now for due in self._due.values())

    @property
    def longest_work(self) -> float:
        """Seconds that the oldest unfinished key is at work."""
        return max((self._clock() - since for since in self._working.values()), default=0.0)

    def add(self, item: Item, delay: float = 0.0) -> None:
        """Asks for a key after `delay` seconds; an earlier time that was asked for stays."""
        due = self._clock() + delay
        if self._due.get(item, due + 1) <= due:
            return
        self._due[item] = due
        self._push(item)

    async def take(self) -> Item:
        """The next key that is due; the caller says `done` when its work is over."""
        while True:
            item, wait = self._next()
            if item is not None:
                del self._due[item]
                self._working[item] = self._clock()
                return item
            self._changed.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, item: Item) -> None:
        """Ends the work on a key; it may be taken again."""
        del self._working[item]
        if item in self._due:
            self._push(item)

    def _push(self, item: Item) -> None:
        heapq.heappush(self._heap, (self._due[item], next(self._order), item))
        self._changed.set()

    def _next(self) -> tuple[Item | None, float | None]:
        """A key that is due, or the seconds until one is; None for no such time."""
        while self._heap:
            due, _, item = self._heap[0]
            # Asked for earlier since, taken already, or at work: `done` pushes the last kind again.
            if self._due.get(item) != due or item in self._working:
                heapq.heappop(self._heap)
                continue
            wait = due - self._clock()
            if wait > 0:
                return None, wait
            heapq.heappop(self._heap)
            return item, None
        return None, None
