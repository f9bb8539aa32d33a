"""What a person sees while something long is done: a live line, or plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def say(sentence: str) -> None:
    """Tells the person something, beside the data on standard output."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


@contextmanager
def step(description: str) -> Iterator[None]:
    """Shows that one piece of work goes on, for how long, and how long it took at its end."""
    began = time.monotonic()
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(f"building {description}", total=None)
            yield
    else:
        say(f"building {description} …")
        yield
    say(f"built {description.split(' ')[0]} in {time.monotonic() - began:.0f} s")
