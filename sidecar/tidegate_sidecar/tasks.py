"""Everything that is done on the remote tier. I/O, in a child process only.

Only this module (and what it calls) touches the remote tier, and only in a process that the loop
can give up. The run's folders are opened once; all work goes through these handles, so a child that
wakes up late works in the folder that was moved aside. Called by `child`; the records are the
messages between it and `workers`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import PurePosixPath

from tidegate_contract.errors import Corrupt, DamagedFile, Reject
from tidegate_contract.folder import ENTRY_ERRORS, Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import RUN_DOCUMENT, Attempt, step_folder
from tidegate_contract.publish import commit_step, create_document, mend_identity, set_aside
from tidegate_contract.run_documents import read_identity, scan_pins
from tidegate_contract.scan import scan_step
from tidegate_contract.seal import FileEntry, Seal
from tidegate_sidecar.faults import Fault, RemoteDamaged, SourceError
from tidegate_sidecar.observe import StepScanner, observe_remote
from tidegate_sidecar.removal import (
    empty_step,
    give_back_hidden,
    is_durable,
    restore_step,
    trash_step,
)
from tidegate_sidecar.retention import RemotePlan
from tidegate_sidecar.transfer import Meter, announce_ranks, copy_ranks
from tidegate_sidecar.view import RemoteView, StepView


class Lane(StrEnum):
    """Two tasks run beside each other: looking and committing never waits for a long copy."""

    LOOK = "look"
    COPY = "copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a child works.

    Attributes:
        local: the run's folder on this node.
        remote_root: an existing folder that is trusted; no link below it is followed.
        remote: the run's folder, relative to `remote_root`.
        identity: the run; a remote folder of another one is refused.
        may_create: make the remote folder and its identity where they are missing.
    """

    local: str
    remote_root: str
    remote: str
    identity: RunIdentity
    may_create: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """See what is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Announce these ranks, then look."""

    attempt: Attempt
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitNow:
    """Commit the attempt, then look."""

    attempt: Attempt
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Retain:
    """Carry out a plan, then look."""

    plan: RemotePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRanks:
    """Copy these ranks' files; the answer is the number of bytes written."""

    attempt: Attempt
    ranks: frozenset[int]
    bytes_per_second: int | None
    files_at_once: int


Task = Look | Announce | CommitNow | Retain | CopyRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A child's word on the task of one lane.

    Attributes:
        lane: which.
        progress_bytes: written since the last message; the rest is then None.
        view: answer of everything but a copy.
        copied_bytes: answer of a copy.
        fault: the task failed.
        is_cancelled: the copy was stopped on request.
    """

    lane: Lane
    progress_bytes: int | None = None
    view: RemoteView | None = None
    copied_bytes: int | None = None
    fault: Fault | None = None
    is_cancelled: bool = False


class RemoteTier:
    """A run's folder on both tiers, opened once by one child."""

    def __init__(self, places: Places) -> None:
        """Opens both folders.

        Raises:
            OSError: a folder cannot be opened.
            Reject: the remote folder belongs to another run, or does not know this one.
            RemoteDamaged: its `run.json` is damaged.
        """
        self._run_id = places.identity.run_id
        try:
            self._local = Folder.open(places.local)
        except OSError as error:
            raise SourceError(f"{places.local}: cannot be read ({error})") from error
        try:
            self._remote = open_remote(places)
        except BaseException:
            self._local.close()
            raise
        self._scanner = StepScanner(
            self._remote, self._run_id, trusts_times=False, entry_errors=ENTRY_ERRORS
        )
        self._confirmed: dict[Attempt, StepView] = {}

    def look(self, tick: Callable[[], None]) -> RemoteView:
        """What is there, with the newest commit made durable and read again."""
        view = observe_remote(self._remote, self._local, self._scanner, self._run_id, tick)
        commits = [step for step in view.steps if step.commit and not step.is_in_trash]
        for step in sorted(commits, key=lambda step: view.key(step) or (0, 0, ""), reverse=True):
            if self._confirmed.get(step.attempt) == step or self.confirm(step.attempt):
                self._confirmed = {step.attempt: step}
                return replace(view, newest=step)
        return view

    def confirm(self, attempt: Attempt) -> bool:
        """Makes a COMMIT durable and reads it; False if it does not hold."""
        return is_durable(self._remote, attempt, self._run_id)

    def announce(self, attempt: Attempt, ranks: frozenset[int]) -> None:
        """Announces this node's ranks of an attempt."""
        with self._remote.ensure_child(step_folder(attempt)) as step:
            announce_ranks(step, self._local_seals(attempt, ranks))

    def commit(self, attempt: Attempt, now: datetime) -> None:
        """Commits an attempt; what is missing or gone shows at the next look.

        Raises:
            DamagedFile: a file was not what was sealed; it lies in quarantine now, so that whoever
                holds it copies it again.
        """
        try:
            step = self._remote.child(step_folder(attempt))
        except FileNotFoundError:
            return
        with step:
            try:
                commit_step(step, attempt, self._run_id, now)
            except DamagedFile as error:
                set_aside(self._remote, step, attempt, error.entry)
                raise

    def retain(self, plan: RemotePlan, tick: Callable[[], None]) -> None:
        """Carries out a plan, unless the commit that it rests on does not hold any more.

        Pins are read again right before each move: one that a person has just written holds. A
        step that refuses does not stop the others.

        Raises:
            OSError: the tier fails, or steps refused and nothing at all could be done.
        """
        refused: list[OSError] = []
        do = partial(self._do, refused, tick)
        if plan.gives_back:
            give_back_hidden(self._remote)
        is_any = any([do(restore_step, attempt) for attempt in plan.restore])
        if plan.confirm is not None and self.confirm(plan.confirm):
            is_any |= any([do(self._trash, attempt) for attempt in plan.trash])
            for attempt in plan.empty:
                is_emptied = do(partial(self._empty, tick), attempt)
                is_any |= is_emptied
                if is_emptied and plan.is_gradual:
                    break
        if refused and not is_any:
            raise refused[0]

    def _do(
        self,
        refused: list[OSError],
        tick: Callable[[], None],
        change: Callable[[Folder, Attempt], bool | None],
        attempt: Attempt,
    ) -> bool:
        try:
            return change(self._remote, attempt) is not False
        except OSError as error:
            if error.errno not in ENTRY_ERRORS:
                raise
            refused.append(error)
            return False
        finally:
            tick()

    def _trash(self, run: Folder, attempt: Attempt) -> bool:
        return attempt not in scan_pins(run) and trash_step(run, attempt)

    @staticmethod
    def _empty(tick: Callable[[], None], run: Folder, attempt: Attempt) -> bool:
        return empty_step(run, attempt, tick)

    def copy(self, task: CopyRanks, meter: Meter) -> int:
        """Copies and receipts this node's ranks of an attempt.

        Raises:
            SourceError: a local file cannot be read or is damaged; then it lies in quarantine now.
        """
        seals = self._local_seals(task.attempt, task.ranks)
        name = step_folder(task.attempt)
        with self._local.child(name) as source, self._remote.ensure_child(name) as target:
            try:
                return copy_ranks(source, target, seals, meter, task.files_at_once)
            except SourceError as error:
                if error.damaged is not None:
                    self._set_aside(source, task.attempt, error.damaged, str(error))
                raise

    def _set_aside(self, step: Folder, attempt: Attempt, entry: FileEntry, why: str) -> None:
        """Reads the file again first: one bad read is not worth a sealed file."""
        try:
            is_damaged = set_aside(self._local, step, attempt, entry)
        except (OSError, Corrupt) as error:
            raise SourceError(f"{why}; it cannot be set aside ({error})", entry) from error
        if not is_damaged:
            raise SourceError(f"{why}, though they are when it is read again")

    def _local_seals(self, attempt: Attempt, ranks: frozenset[int]) -> list[Seal]:
        name = step_folder(attempt)
        try:
            with self._local.child(name) as source:
                seals = scan_step(source, attempt, name, self._run_id).seals
        except OSError as error:
            raise SourceError(f"{self._local.path}/{name}: cannot be read ({error})") from error
        if not ranks <= set(seals):
            raise SourceError(f"{self._local.path}/{name}: not whole any more")
        return [seals[rank] for rank in sorted(ranks)]


def open_remote(places: Places) -> Folder:
    """The run's folder on the remote tier.

    A folder that does not know the run is refused, not made: the run began on the remote tier, so
    this would be an unmounted file system, and "durable" would mean this node's own disk.

    Raises:
        OSError: it cannot be opened.
        Reject: see above; or it belongs to another run.
        RemoteDamaged: its `run.json` is damaged, and may be another run's.
    """
    try:
        with Folder.open(places.remote_root) as root:
            folder = root.below(PurePosixPath(places.remote).parts, makes=places.may_create)
    except FileNotFoundError as error:
        raise _unknown_run(places) from error
    try:
        _check_run(folder, places)
    except BaseException:
        folder.close()
        raise
    return folder


def _check_run(folder: Folder, places: Places) -> None:
    found = _read_identity(folder, places.identity)
    if found is None and places.may_create:
        create_document(folder, RUN_DOCUMENT, places.identity)
        found = _read_identity(folder, places.identity)
    if found is None:
        raise _unknown_run(places)
    if found.run_id != places.identity.run_id:
        raise Reject(
            f"{folder.path}/{RUN_DOCUMENT}: belongs to run {found.run_id}, not to"
            f" {places.identity.run_id}; move that folder aside or use another path"
        )


def _read_identity(folder: Folder, own: RunIdentity) -> RunIdentity | None:
    """The identity of a remote folder; a damaged one is mended with this node's."""
    try:
        return read_identity(folder)
    except Corrupt:
        pass  # as good as none, but that it may have been another run's
    try:
        return mend_identity(folder, replace(own, uid=os.geteuid()))  # a tenant wrote `own`
    except Corrupt as error:  # no attempt's own failure: nothing can be done before it is mended
        raise RemoteDamaged(str(error)) from error


def _unknown_run(places: Places) -> Reject:
    return Reject(
        f"{places.remote_root}/{places.remote}/{RUN_DOCUMENT} is missing: this is not the remote"
        f" tier that run {places.identity.name} began on; is it mounted?"
    )
