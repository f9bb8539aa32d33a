"""Waiting for a condition: the one place where a test or the ground may sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tidegate_ground.errors import CommandFailed, DeadlineExceeded

T = TypeVar("T")


def wait_until(
    what: str, probe: Callable[[], T], seconds: float, *, every_seconds: float = 0.1
) -> T:
    """Asks `probe` again and again until it holds, and returns what it returned then.

    A probe holds when it returns something true. It does not hold yet when it returns something
    false, raises AssertionError (so a probe may be written with `assert`), or when a command in
    it fails (the API server may be away for a moment).

    Args:
        what: the condition in words, for the error.
        probe: looks once; must not wait itself.
        seconds: the deadline, counted from now.
        every_seconds: the pause between two looks.

    Raises:
        DeadlineExceeded: with `what` and what the last look saw.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = probe()
            if value:
                return value
            seen = repr(value)
        except (AssertionError, CommandFailed) as error:
            seen = str(error) or repr(error)
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what}: not within {seconds:g} s; last seen: {seen}")
        time.sleep(every_seconds)
