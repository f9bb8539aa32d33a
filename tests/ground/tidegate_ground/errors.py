"""What goes wrong in the ground, as sentences for a person.

GroundError           something the person at the keyboard can act on
├── CommandFailed     a program ended with an error; carries its exit code and output
└── DeadlineExceeded  something awaited did not come in time
"""

from __future__ import annotations


class GroundError(Exception):
    """One sentence: what is wrong, and what is allowed or to be done."""


class CommandFailed(GroundError):
    """A program ended with a non-zero exit code.

    Attributes:
        returncode: its exit code, or minus the signal that ended it.
        stdout: what it wrote to standard output.
        stderr: what it wrote to standard error.
    """

    def __init__(self, argv: list[str], returncode: int, stdout: str, stderr: str) -> None:
        last_words = "\n".join((stderr or stdout).strip().splitlines()[-20:])
        super().__init__(f"`{' '.join(argv)}` ended with {returncode}: {last_words}")
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr


class DeadlineExceeded(GroundError):
    """What was awaited, for how long, and what was seen last."""
