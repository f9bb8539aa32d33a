"""Processes of the ground: started apart from their starter, known by pid and start time.

A pid alone may belong to a stranger by now, so nothing is ever signalled by pid or by name only.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate_ground import commands
from tidegate_ground.errors import GroundError
from tidegate_ground.waiting import wait_until

# Enters cgroups, then becomes the command; "0" stands for the writer itself.
JOIN = """
for file in $1; do echo 0 >"$file" || exit 1; done
shift
exec "$@"
"""
# A shell in between, so that the process is nobody's child but init's: no zombie is left in a
# test session, and no code runs between fork and exec of a threaded Python.
LEAVE_BEHIND = """
log=$1; shift
"$@" </dev/null >>"$log" 2>&1 &
echo $!
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PidRecord:
    """One process for all time of this boot.

    Attributes:
        pid: its pid in the host's pid namespace.
        start_ticks: when it started, in clock ticks since boot.
    """

    pid: int
    start_ticks: int

    def to_json(self) -> dict[str, int]:
        """Returns the record as it is stored."""
        return {"pid": self.pid, "start_ticks": self.start_ticks}

    @classmethod
    def from_json(cls, stored: Mapping[str, int]) -> PidRecord:
        """Reads what `to_json` returned."""
        return cls(pid=stored["pid"], start_ticks=stored["start_ticks"])


def parse_stat(text: str) -> tuple[str, int]:
    """Returns state and start time of a /proc/PID/stat line; the name in it may hold anything."""
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def observe(pid: int) -> PidRecord | None:
    """Returns the record of a running process, or None when there is none or a zombie only."""
    try:
        state, start_ticks = parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except OSError:
        return None
    return None if state in "ZX" else PidRecord(pid=pid, start_ticks=start_ticks)


def require(pid: int) -> PidRecord:
    """Returns the record of a process that must be running.

    Raises:
        GroundError: it is not.
    """
    record = observe(pid)
    if record is None:
        raise GroundError(f"There is no process {pid} on this machine.")
    return record


def is_alive(record: PidRecord) -> bool:
    """Says whether that very process still runs."""
    return observe(record.pid) == record


def send(record: PidRecord, signum: signal.Signals) -> None:
    """Signals that very process; does nothing when it is gone."""
    try:
        handle = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        # The handle stays on one process whatever becomes of the pid; is it the right one?
        if is_alive(record):
            signal.pidfd_send_signal(handle, signum)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def end(record: PidRecord, seconds: float = 10) -> None:
    """Ends that very process with SIGKILL and waits until it is gone.

    Raises:
        DeadlineExceeded: it was still there after `seconds`.
    """
    send(record, signal.SIGKILL)
    wait_until(f"the end of process {record.pid}", lambda: not is_alive(record), seconds)


def enter_groups(groups: Sequence[Path]) -> list[str]:
    """Returns the head of a command that runs in a session and in cgroups of its own."""
    return ["setsid", "--wait", "sh", "-c", JOIN, "sh", " ".join(map(str, groups))]


def clean_environment(env: Mapping[str, str]) -> list[str]:
    """Returns the head of a command that has this environment and nothing of the caller's."""
    return ["env", "-i", *[f"{name}={value}" for name, value in env.items()]]


def spawn(
    argv: Sequence[str | Path], *, log: Path, groups: Sequence[Path], env: Mapping[str, str]
) -> PidRecord:
    """Starts a process that outlives this one, in its own session and without its environment.

    Args:
        argv: the program, by absolute path, and its arguments.
        log: the file its output is appended to.
        groups: the `cgroup.procs` files it is entered into.
        env: its whole environment.

    Raises:
        GroundError: it ended at once.
        CommandFailed: a cgroup did not take it.
    """
    leave: list[str | Path] = ["sh", "-c", LEAVE_BEHIND, "sh", log]
    started = commands.run(*enter_groups(groups), *leave, *clean_environment(env), *argv)
    record = observe(int(started.stdout))
    if record is None:
        raise GroundError(f"{argv[0]} ended as soon as it was started; its log is {log}.")
    return record


def save(record: PidRecord, file: Path) -> None:
    """Writes a record to a file."""
    file.write_text(json.dumps(record.to_json()))


def load(file: Path) -> PidRecord | None:
    """Reads a record from a file; None when there is no such file."""
    try:
        return PidRecord.from_json(json.loads(file.read_text()))
    except FileNotFoundError:
        return None
