"""Takes over what dead pods left sealed on this node. `decide_adoptions` is pure, the rest I/O.

A copy runs as its own process under the run's user, never as the agent: it reads what a tenant
wrote, within a bound on its memory (`memory`). Whether anything is still missing on the remote tier
only that process finds out; a folder that it left whole waits for a change, or for its next visit.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from tidegate_contract import keys
from tidegate_contract.document import encode
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import parse_seal_file, parse_step_folder, parse_target_file
from tidegate_contract.wire import Target
from tidegate_sidecar.agent_settings import LocalTier, RemoteTier
from tidegate_sidecar.folders import read_target
from tidegate_sidecar.lock import FlushLock
from tidegate_sidecar.memory import share_of_container

logger = logging.getLogger(__name__)

MAX_ADOPTIONS = 2
"""Copies of dead runs at once on one node."""
_RETRY_SECONDS = 60.0
_MAX_RETRY_SECONDS = 1800.0
SILENT_SECONDS = 600.0
"""A copy without progress for so long holds a slot that others need: it gave each stalled task up
long before, and its turn among the nodes has come."""
REVISIT_SECONDS = 1800.0
"""After a whole copy: a file of it that is set aside as damaged on the remote tier later may be had
from this node only. Seldom enough that each dead run costs a second of one core in an hour."""
MAX_FOLDERS = 256
"""Step folders of one run that are opened at a look, newest first: a tenant can leave any number,
and each look opens them all. A local tier keeps a handful, and only the newest sealed is copied."""
_TOO_MANY = f"more than {MAX_FOLDERS} step folders: only the newest are looked at"
_STALLS = 5
"""Or for so many of the policy's stall timeouts, where these are long."""
_KILLED = -signal.SIGKILL


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
    due.sort(key=lambda left: _is_whole(left, attempted.get(left.run)))  # those can wait
    return due[: max(0, MAX_ADOPTIONS - len(running))]


def _is_due(left: Leftover, last: Attempted | None, now: float) -> bool:
    if last is None or last.signature != left.signature:
        return True
    return now - last.ended_at >= _wait_seconds(last.failures)


def _wait_seconds(failures: int) -> float:
    if failures == 0:
        return REVISIT_SECONDS
    return min(_RETRY_SECONDS * float(2 ** min(failures - 1, 16)), _MAX_RETRY_SECONDS)


def _is_whole(left: Leftover, last: Attempted | None) -> bool:
    return last is not None and last.signature == left.signature and last.failures == 0


def observe_leftovers(tier: LocalTier, tell: Callable[[str, str], None]) -> list[Leftover]:
    """Run folders of a tier with sealed steps that no process flushes.

    Args:
        tier: where to look.
        tell: takes a namespace or run that cannot be read, and why; the others are not held up.

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
                try:
                    names = [name for entry in parent.names() if (name := parse_target_file(entry))]
                except OSError as error:
                    tell(namespace, str(error))
                    continue
                for name in names:
                    run = f"{namespace}/{name}"
                    try:
                        left = _leftover(tier, parent, run, partial(tell, run))
                    except (OSError, Corrupt, Reject) as error:
                        tell(run, str(error))
                        continue
                    found += [left] if left else []
    return found


def _leftover(
    tier: LocalTier, parent: Folder, run: str, tell: Callable[[str], None]
) -> Leftover | None:
    name = run.partition("/")[2]
    target = read_target(parent, name)
    if target is None:
        return None
    try:
        folder = parent.child(name)
    except FileNotFoundError:
        return None
    with folder:
        signature = _signature(folder, tell)
        if not signature or not _is_free(folder):
            return None
    return Leftover(
        run=run, folder=tier.root / run, gid=tier.gid, target=target, signature=signature
    )


def _signature(run: Folder, tell: Callable[[str], None]) -> tuple[tuple[str, int], ...]:
    newest_first = (n for n in reversed(run.names()) if parse_step_folder(n) is not None)
    names = list(islice(newest_first, MAX_FOLDERS + 1))
    if len(names) > MAX_FOLDERS:
        tell(_TOO_MANY)
    sealed = []
    for name in reversed(names[:MAX_FOLDERS]):
        with suppress(OSError), run.child(name) as step:  # one that cannot be read hides no other
            if any(parse_seal_file(file) is not None for file in step.names()):
                sealed.append((name, os.fstat(step.fd).st_mtime_ns))
    return tuple(sealed)


def _is_free(run: Folder) -> bool:
    lock = FlushLock(run)
    try:
        return lock.try_take()
    finally:
        lock.release()


@dataclass(slots=True, kw_only=True)
class _Copying:
    left: Leftover
    process: subprocess.Popen[bytes]
    progress: int
    heard: float


class Adoptions:
    """The copies that this agent started; one thread."""

    def __init__(self, remote: Iterable[RemoteTier]) -> None:
        """Starts nothing yet."""
        self._roots = {tier.name: tier.root for tier in remote}
        self._running: dict[str, _Copying] = {}
        self._given_up: list[subprocess.Popen[bytes]] = []
        self._attempted: dict[str, Attempted] = {}

    @property
    def running(self) -> frozenset[str]:
        """Runs whose copy is under way."""
        return frozenset(self._running)

    def collect(self, now: float) -> None:
        """Takes note of copies that ended, and ends those that do not get on."""
        self._given_up = [process for process in self._given_up if process.poll() is None]
        for run, copy in list(self._running.items()):
            status = copy.process.poll()
            if status is None:
                status = self._watch(copy, now)
            if status is None:
                continue
            os.close(copy.progress)
            del self._running[run]
            self._note(copy.left, status, now)
            logger.info("leftovers copied", extra={"run": run, "status": status})

    def _watch(self, copy: _Copying, now: float) -> int | None:
        """Kills a copy that has been silent for too long; None while it may go on."""
        with suppress(BlockingIOError):
            if os.read(copy.progress, 1 << 16):
                copy.heard = now
        patience = max(SILENT_SECONDS, _STALLS * copy.left.target.policy.stall_timeout_seconds)
        if now - copy.heard < patience:
            return None
        logger.error("a copy of leftovers does not get on", extra={"run": copy.left.run})
        _kill(copy.process)
        self._given_up.append(copy.process)  # in an endless sleep it outlives that
        return _KILLED

    def start(self, leftovers: Iterable[Leftover], live_runs: frozenset[str], now: float) -> None:
        """Starts the copies that are due."""
        due = decide_adoptions(leftovers, live_runs, self._attempted, self.running, now)
        for left in due:
            try:
                self._running[left.run] = self._copy(left, now)
            except (OSError, Reject) as error:
                logger.error(
                    "leftovers cannot be copied", extra={"run": left.run, "error": str(error)}
                )
                self._note(left, 1, now)

    def _copy(self, left: Leftover, now: float) -> _Copying:
        root = self._roots.get(left.target.tier)
        if root is None:
            raise Reject(f"remote tier {left.target.tier!r} is none of the chart's tiers")
        logger.info("leftovers are taken over", extra={"run": left.run})
        progress, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            process = _start_copy(left, root, theirs)
        except OSError:
            os.close(progress)
            raise
        finally:
            os.close(theirs)
        return _Copying(left=left, process=process, progress=progress, heard=now)

    def _note(self, left: Leftover, status: int, now: float) -> None:
        last = self._attempted.get(left.run)
        failures = 0 if status == 0 else (last.failures if last else 0) + 1
        self._attempted[left.run] = Attempted(
            signature=left.signature, failures=failures, ended_at=now
        )

    def close(self) -> None:
        """Ends the copies; what they did stays, what they did not the next agent does."""
        for copy in self._running.values():
            copy.process.terminate()
        for copy in self._running.values():
            os.close(copy.progress)
            try:
                copy.process.wait(1.0)
            except subprocess.TimeoutExpired:
                copy.process.kill()
        self._running.clear()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _start_copy(left: Leftover, root: Path, progress: int) -> subprocess.Popen[bytes]:
    own = os.geteuid()
    command = [
        *(sys.executable, "-m", "tidegate_sidecar", "flush", "--once"),
        *("--local", str(left.folder)),
        *("--remote", str(root / left.target.path)),
        *("--remote-root", str(root)),
        *("--memory", str(share_of_container(MAX_ADOPTIONS))),
        *("--progress-fd", str(progress)),
    ]
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    return subprocess.Popen(
        command,
        env=kept | {keys.ENV_POLICY: encode(left.target.policy).decode()},
        stdin=subprocess.DEVNULL,
        pass_fds=(progress,),
        start_new_session=True,
        user=left.target.uid if own == 0 else None,
        group=left.target.gid if own == 0 else None,
        extra_groups=[left.gid] if own == 0 else None,
    )
