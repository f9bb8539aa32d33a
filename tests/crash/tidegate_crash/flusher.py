"""A node's flusher as one sequential process: the sidecar's own decisions and calls, beat by beat.

Where the sidecar starts a task in a child, this calls it at once; where it waits for the clock, the
time is over. Everything that is decided or written is production code.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event
from unittest import mock

from tidegate_contract.errors import Corrupt, TidegateError
from tidegate_contract.folder import Folder
from tidegate_contract.layout import Attempt
from tidegate_contract.run_documents import read_identity
from tidegate_contract.wire import Policy
from tidegate_crash.install import InlineExecutor
from tidegate_crash.scenario import Actor, Fact, History, Place
from tidegate_crash.stage import NOW
from tidegate_sidecar import transfer
from tidegate_sidecar.decide import (
    Copy,
    Facts,
    decide_announcement,
    decide_commit,
    decide_copy,
    decide_queue,
)
from tidegate_sidecar.faults import Fault, RemoteDamaged, Side, SourceError, fault_of
from tidegate_sidecar.lock import FlushLock
from tidegate_sidecar.observe import LocalView, StepScanner, observe_local
from tidegate_sidecar.removal import empty_step, trash_step
from tidegate_sidecar.retention import (
    TRASH_GRACE_SECONDS,
    decide_local_retention,
    decide_remote_retention,
)
from tidegate_sidecar.tasks import CopyRanks, Places, RemoteTier
from tidegate_sidecar.transfer import Meter, TokenBucket
from tidegate_sidecar.view import RemoteView

_MAX_BEATS = 12
_LONG_SECONDS = 1e6
_TASK_ERRORS = (OSError, TidegateError, SourceError, RemoteDamaged)


@contextmanager
def inline_copies() -> Iterator[None]:
    """The copy engine without threads; whoever runs actors one call at a time needs it."""
    with mock.patch.object(transfer, "ThreadPoolExecutor", InlineExecutor):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """What one flusher process does besides copying and committing.

    Attributes:
        copies: copies what is sealed, while it has the lock; False leaves it to others.
        commits: commits what is complete; False leaves it to others.
        tidies_local: local copies go that retention names.
        tidies_remote: retention and collection on the remote tier.
        empties: the grace of everything in `.trash` is over.
        policy: live values.
        lineage: that the trainers of the node are in.
    """

    copies: bool = True
    commits: bool = True
    tidies_local: bool = False
    tidies_remote: bool = False
    empties: bool = False
    policy: Policy = Policy(remote_keep=1, local_keep=1, files_per_node=1)  # noqa: RUF009  # frozen
    lineage: int = 1


class Flusher:
    """One process that flushes a run on one node; close it, or use it as a context manager."""

    def __init__(self, place: Place, history: History, node: int, duty: Duty) -> None:
        """Opens the local folder and takes the lock if it is free.

        Raises:
            OSError, TidegateError: the local tier fails.
        """
        self._history = history
        self._duty = duty
        self._run = Folder.open(place.nodes[node])
        self._lock = FlushLock(self._run)
        identity = read_identity(self._run)
        if identity is None:
            raise FileNotFoundError(f"{self._run.path}: holds no run")
        self._run_id = identity.run_id
        self._lock.try_take()
        self._places = Places(
            local=place.nodes[node],
            remote_root=place.remote_root,
            remote=os.path.basename(place.remote),
            identity=identity,
        )
        self._opened: RemoteTier | None = None
        self._remote: RemoteView | None = None
        self._refused: set[Attempt] = set()
        self.is_failing = False

    def __enter__(self) -> "Flusher":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Frees the lock."""
        self._lock.release()
        self._run.close()

    @property
    def _tier(self) -> RemoteTier:
        """Opened at the first task, as in a child."""
        self._opened = self._opened or RemoteTier(self._places)
        return self._opened

    def work(self) -> bool:
        """Beats until nothing is left to do; True if anything was done."""
        is_any = False
        for _ in range(_MAX_BEATS):
            if not self.beat():
                return is_any
            is_any = True
        self._history.complain("I5 a flusher finds something to do for ever")
        return is_any

    def beat(self) -> bool:
        """One pass of observe, decide, apply; False if nothing was to be done."""
        if self._remote is None and not self._task(None, lambda: None):
            return False
        local = observe_local(self._run, StepScanner(self._run, self._run_id, trusts_times=True))
        facts = self._facts(local)
        if self._duty.copies and facts.holds_lock and self._copy(facts):
            return True
        commit = decide_commit(facts) if self._duty.commits else None
        if commit is not None:
            return self._task(commit, lambda: self._tier.commit(commit, NOW))
        return self._tidy_remote() or (facts.holds_lock and self._tidy_local(local))

    def _facts(self, local: LocalView) -> Facts:
        remote = self._remote or RemoteView()
        return Facts(
            policy=self._duty.policy,
            local=local.steps,
            remote=remote,
            holds_lock=self._lock.is_held,
            refused=frozenset(self._refused),
            complete_seconds={step.attempt: _LONG_SECONDS for step in remote.steps},
            waited_seconds=_LONG_SECONDS,
        )

    def _copy(self, facts: Facts) -> bool:
        queue = decide_queue(facts)
        announcement = decide_announcement(facts, queue)
        if announcement is not None:
            attempt, ranks = announcement.attempt, announcement.ranks
            return self._task(attempt, lambda: self._tier.announce(attempt, ranks))
        copy = decide_copy(facts, queue)
        if not isinstance(copy, Copy):
            return False
        task = CopyRanks(
            attempt=copy.attempt, ranks=copy.ranks, bytes_per_second=None, files_at_once=1
        )
        meter = Meter(TokenBucket(None), Event(), lambda _: None)
        return self._task(copy.attempt, lambda: self._tier.copy(task, meter))

    def _tidy_remote(self) -> bool:
        if not self._duty.tidies_remote or self._remote is None:
            return False
        ages = {s.attempt: TRASH_GRACE_SECONDS for s in self._remote.steps if s.is_in_trash}
        remote = replace(self._remote, trash_age_seconds=ages if self._duty.empties else {})
        plan = decide_remote_retention(remote, self._duty.policy.remote_keep)
        return plan.is_needed and self._task(None, lambda: self._tier.retain(plan, lambda: None))

    def _tidy_local(self, local: LocalView) -> bool:
        if not self._duty.tidies_local:
            return False
        try:
            return self._remove_old(local)
        except (OSError, Corrupt):  # the loop tells it once and tries again
            return False

    def _remove_old(self, local: LocalView) -> bool:
        for attempt in local.trash:
            empty_step(self._run, attempt)
        gone = decide_local_retention(
            local.steps,
            self._remote,
            keep=self._duty.policy.local_keep,
            lineage=self._duty.lineage,
        )
        for attempt in gone:
            trash_step(self._run, attempt)
            empty_step(self._run, attempt)
        return bool(gone or local.trash)

    def _task(self, attempt: Attempt | None, action: Callable[[], object]) -> bool:
        """Does a child's task and looks again; a fault is taken as the loop takes it."""
        try:
            action()
            self._remote = self._tier.look(lambda: None)
        except _TASK_ERRORS as error:
            self._take_fault(attempt, fault_of(error))
            return not self.is_failing
        if self._remote.newest is not None:
            self._history.note(Fact.COMMITTED, self._remote.newest.attempt)
        return True

    def _take_fault(self, attempt: Attempt | None, fault: Fault) -> None:
        if fault.side is Side.REMOTE or attempt is None:
            self.is_failing = True  # the loop waits and tries again: here the next process does
            return
        self._refused.add(attempt)


def flush(node: int, duty: Duty | None = None) -> Actor:
    """A process that flushes what is sealed on a node, once, to its end."""

    def actor(place: Place, history: History) -> None:
        with Flusher(place, history, node, duty or Duty()) as flusher:
            flusher.work()

    return actor
