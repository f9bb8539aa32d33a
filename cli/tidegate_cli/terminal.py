"""What a person sees: safe text, figures, failures of one sentence. Output only.

Names and words in a run's folder may be anybody's: everything from there goes through `plain`, so
that no control character and no markup reaches the terminal. Colours and progress are for terminals
alone. Called by all verbs.
"""

import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from tidegate_contract.errors import TidegateError

EXIT_STATUS = (
    "Exit status: 0 all well; 1 something is damaged, nothing is there, or it was refused; "
    "2 wrong usage."
)
READER_GONE = 141
"""Status when whoever read the output closed it: as if SIGPIPE had ended the command."""
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_MAX_SHOWN = 2000


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Without this, a reader that has enough would look like damage: status 1."""
        raise BrokenPipeError


class NowhereToWrite(TidegateError):
    """Stdout takes no more."""


out = _Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
err = _Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def plain(text: str) -> str:
    """The text with every control, direction and undecodable character spelled out."""
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
    return "".join(_spelled(c) if unicodedata.category(c) in _UNSAFE else c for c in shown)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def say(sentence: str, style: str | None = None) -> None:
    """A line of the answer, on stdout."""
    say_styled(Text(plain(sentence), style or ""))


def say_styled(text: Text) -> None:
    """A line of the answer whose text is safe already."""
    with _naming_stdout():
        out.print(text)


def warn(sentence: str) -> None:
    """A line beside the answer, on stderr."""
    err.print(plain(sentence))


def fail(sentence: str) -> NoReturn:
    """Ends the command with one sentence and status 1."""
    warn(sentence)
    raise typer.Exit(1)


def say_json(document: Mapping[str, Any]) -> None:
    """The answer as one JSON document, on one line where nobody reads it.

    ASCII, so that nothing in it acts on a terminal.
    """
    with _naming_stdout():
        out.file.write(json.dumps(document, indent=2 if out.is_terminal else None) + "\n")
        out.file.flush()


@contextmanager
def _naming_stdout() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NowhereToWrite(f"stdout: {error.strerror}") from error


def silence_stdout() -> None:
    """Lets go of what stdout did not take, which the interpreter would try again at its end."""
    try:
        target = sys.stdout.fileno()
    except OSError:
        return  # not a file: nothing is tried again
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, target)
    os.close(nothing)


def can_ask() -> bool:
    """A person is there to answer."""
    return sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def naming(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Completes the path of an error of a call that named a file of an open folder only."""
    try:
        yield
    except OSError as error:
        name = error.filename
        if isinstance(name, str) and "/" not in name:
            error.filename = f"{os.fspath(folder)}/{name}"
        raise


def sentence_of(error: OSError | TidegateError) -> str:
    """What went wrong, for people; the path is that of the call that failed."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{where}{error.strerror}"


def show_size(size_bytes: float) -> str:
    """Bytes in the largest fitting unit, as 3.1 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def show_count(count: float) -> str:
    """A large count in three figures, as 1.26T; JSON holds the exact one."""
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.0f}" if not unit else f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


def show_time(when: datetime) -> str:
    """Minute in UTC, as 2026-11-29 12:00."""
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M}"


def time_text(when: datetime | None) -> str | None:
    """A time in JSON: ISO 8601, seconds, UTC; None where there is none."""
    return None if when is None else f"{when.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def show_ranks(ranks: Iterable[int]) -> str:
    """Ranks as `rank 3` or `ranks 0-3, 8`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank {text}" if is_one else f"ranks {text or 'none'}"


def bytes_progress(*, is_hidden: bool) -> Progress:
    """A bar over bytes on stderr; nothing at all where that is no terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=err,
        expand=True,
        transient=True,
        disable=is_hidden or not err.is_terminal,
    )
