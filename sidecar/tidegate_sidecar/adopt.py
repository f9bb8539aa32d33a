"""Takes over what dead pods left sealed on this node. `decide_adoptions` is pure, the rest I/O.

A copy runs as its own process under the run's user, never as the agent: it reads what a tenant
wrote. Whether anything is still missing on the remote tier only that process finds out; a folder
that it left whole is not looked at again before it changes.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tidegate_contract import keys
from tidegate_contract.document import encode
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import parse_seal_file, parse_step_folder, parse_target_file
from tidegate_contract.wire import Target
from tidegate_sidecar.agent_settings import LocalTier, RemoteTier
from tidegate_sidecar.folders import read_target
from tidegate_sidecar.lock import FlushLock

logger = logging.getLogger(__name__)

MAX_ADOPTIONS = 2
"""Copies of dead runs at once on one node."""
_RETRY_SECONDS = 60.0
_MAX_RETRY_SECONDS = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A run's folder that nobody flushes.

    Attributes:
        run: `namespace/name`.
        folder: as this process sees it.
        gid: group of its tier.
        target: where its steps go.
        signature: changes whenever a sealed step does.
    """

    run: str
    folder: Path
    gid: int
    target: Target
    signature: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """The last copy of a run's leftovers.

    Attributes:
        signature: of the folder then.
        failures: in a row; 0 after a whole copy.
        ended_at: on the steady clock.
    """

    signature: tuple[tuple[str, int], ...]
    failures: int
    ended_at: float


def decide_adoptions(
    leftovers: Iterable[Leftover],
    live_runs: frozenset[str],
    attempted: Mapping[str, Attempted],
    running: frozenset[str],
    now: float,
) -> list[Leftover]:
    """Whose copies are started now.

    Args:
        leftovers: folders with sealed steps whose lock is free.
        live_runs: runs with a live pod on this node; theirs is the sidecar's.
        attempted: run → its last copy.
        running: runs whose copy is under way.
        now: on the steady clock.
    """
    due = [
        left
        for left in leftovers
        if left.signature
        and left.run not in live_runs | running
        and _is_due(left, attempted.get(left.run), now)
    ]
    return due[: max(0, MAX_ADOPTIONS - len(running))]


def _is_due(left: Leftover, last: Attempted | None, now: float) -> bool:
    if last is None or last.signature != left.signature:
        return True
    if last.failures == 0:
        return False
    wait = min(_RETRY_SECONDS * float(2 ** min(last.failures - 1, 16)), _MAX_RETRY_SECONDS)
    return now - last.ended_at >= wait


def observe_leftovers(tier: LocalTier) -> list[Leftover]:
    """Run folders of a tier with sealed steps that no process flushes.

    Raises:
        OSError: the tier cannot be read.
    """
    found = []
    with Folder.open(tier.root) as root:
        for namespace in root.names():
            try:
                parent = root.child(namespace)
            except OSError:
                continue  # a file, a link, or gone
            with parent:
                found += _leftovers_of(tier, parent, namespace)
    return found


def _leftovers_of(tier: LocalTier, parent: Folder, namespace: str) -> list[Leftover]:
    found = []
    for entry in parent.names():
        name = parse_target_file(entry)
        target = read_target(parent, name) if name else None
        if name is None or target is None:
            continue
        try:
            run = parent.child(name)
        except OSError:
            continue
        with run:
            signature = _signature(run)
            if signature and _is_free(run):
                found.append(
                    Leftover(
                        run=f"{namespace}/{name}",
                        folder=tier.root / namespace / name,
                        gid=tier.gid,
                        target=target,
                        signature=signature,
                    )
                )
    return found


def _signature(run: Folder) -> tuple[tuple[str, int], ...]:
    sealed = []
    for name in run.names():
        if parse_step_folder(name) is None:
            continue
        try:
            step = run.child(name)
        except OSError:
            continue
        with step:
            if any(parse_seal_file(file) is not None for file in step.names()):
                sealed.append((name, os.fstat(step.fd).st_mtime_ns))
    return tuple(sealed)


def _is_free(run: Folder) -> bool:
    lock = FlushLock(run)
    try:
        return lock.try_take()
    finally:
        lock.release()


class Adoptions:
    """The copies that this agent started; one thread."""

    def __init__(self, remote: Iterable[RemoteTier]) -> None:
        """Starts nothing yet."""
        self._roots = {tier.name: tier.root for tier in remote}
        self._running: dict[str, tuple[Leftover, subprocess.Popen[bytes]]] = {}
        self._attempted: dict[str, Attempted] = {}

    @property
    def running(self) -> frozenset[str]:
        """Runs whose copy is under way."""
        return frozenset(self._running)

    def collect(self, now: float) -> None:
        """Takes note of copies that ended."""
        for run, (left, process) in list(self._running.items()):
            status = process.poll()
            if status is None:
                continue
            del self._running[run]
            self._note(left, status, now)
            logger.info("leftovers copied", extra={"run": run, "status": status})

    def start(self, leftovers: Iterable[Leftover], live_runs: frozenset[str], now: float) -> None:
        """Starts the copies that are due."""
        due = decide_adoptions(leftovers, live_runs, self._attempted, self.running, now)
        for left in due:
            try:
                self._running[left.run] = (left, self._copy(left))
            except (OSError, Reject) as error:
                logger.error(
                    "leftovers cannot be copied", extra={"run": left.run, "error": str(error)}
                )
                self._note(left, 1, now)

    def _copy(self, left: Leftover) -> "subprocess.Popen[bytes]":
        root = self._roots.get(left.target.tier)
        if root is None:
            raise Reject(f"remote tier {left.target.tier!r} is none of the chart's tiers")
        logger.info("leftovers are taken over", extra={"run": left.run})
        return _start_copy(left, root)

    def _note(self, left: Leftover, status: int, now: float) -> None:
        last = self._attempted.get(left.run)
        failures = 0 if status == 0 else (last.failures if last else 0) + 1
        self._attempted[left.run] = Attempted(
            signature=left.signature, failures=failures, ended_at=now
        )

    def close(self) -> None:
        """Ends the copies; what they did stays, what they did not the next agent does."""
        for _, process in self._running.values():
            process.terminate()
        for _, process in self._running.values():
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()


def _start_copy(left: Leftover, root: Path) -> subprocess.Popen[bytes]:
    own = os.geteuid()
    command = [
        *(sys.executable, "-m", "tidegate_sidecar", "flush", "--once"),
        *("--local", str(left.folder)),
        *("--remote", str(root / left.target.path)),
        *("--remote-root", str(root)),
    ]
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    return subprocess.Popen(
        command,
        env=kept | {keys.ENV_POLICY: encode(left.target.policy).decode()},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        user=left.target.uid if own == 0 else None,
        group=left.target.gid if own == 0 else None,
        extra_groups=[left.gid] if own == 0 else None,
    )
