"""Running a program to its end; every call of another program goes through here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tidegate_ground.errors import CommandFailed


def search_path() -> str:
    """Returns PATH with the administrator's folders, which a shell of `su` may not have."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


def run(
    *argv: str | Path | int,
    stdin: str | IO[bytes] | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a program and returns what it wrote.

    Args:
        argv: the program and its arguments.
        stdin: text or an open file for its standard input; None gives it an empty one.
        check: whether a non-zero exit code is an error.
        env: variables laid over the environment of this process.
        cwd: the folder it runs in.

    Raises:
        CommandFailed: `check` is set and the exit code is not zero.
    """
    words = [str(word) for word in argv]
    text, file = (stdin, None) if isinstance(stdin, str) else (None, stdin or subprocess.DEVNULL)
    done = subprocess.run(
        words,
        input=text,
        stdin=file,
        check=False,
        text=True,
        capture_output=True,
        env={**os.environ, "PATH": search_path(), **(env or {})},
        cwd=cwd,
    )
    if check and done.returncode:
        raise CommandFailed(words, done.returncode, done.stdout, done.stderr)
    return done
