"""Facts of the two tiers: step folders as `scan` sees them, states, disk. Reads only.

`loop` observes the local tier itself; the remote one is observed in a child (`tasks`).
"""

import os
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from tidegate_contract.document import decode
from tidegate_contract.errors import Corrupt, Reject, TidegateError
from tidegate_contract.folder import ENTRY_ERRORS, Folder
from tidegate_contract.identity import LineageClaim, RunIdentity
from tidegate_contract.layout import (
    CONTROL_DOCUMENT,
    LINEAGES,
    PINS,
    TRASH,
    Attempt,
    parse_state_file,
    parse_step_folder,
    step_folder,
)
from tidegate_contract.restore_point import merge_claims
from tidegate_contract.run_documents import read_identity, scan_claims, scan_pins
from tidegate_contract.scan import StepRecord, scan_step
from tidegate_contract.wire import Control, TrainerState
from tidegate_sidecar.removal import Leftovers, find_leftovers
from tidegate_sidecar.view import RemoteView, StepView, view_of

D = TypeVar("D")
T = TypeVar("T")
_UNREAD = (0, 0, 0)
"""Stamp of what could not be read: no folder has it, so the next look tries again."""
_SETTLED_SECONDS = 2.0
"""A folder's times may be as coarse as this: two changes within it can leave the same stamp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalView:
    """The run's folder on this node.

    Attributes:
        identity: of the run; None while the trainer has not written it.
        steps: all step folders.
        trash: steps that a removal left half done.
        states: rank → newest document.
        control: what a sidecar last told the trainer.
        used_percent: of the file system.
        is_remote: it holds what only a remote tier does; somebody swapped the two.
    """

    identity: RunIdentity | None
    steps: tuple[StepView, ...] = ()
    trash: tuple[Attempt, ...] = ()
    states: dict[int, TrainerState] = field(default_factory=dict)
    control: Control | None = None
    used_percent: float = 0.0
    is_remote: bool = False


@dataclass(slots=True, kw_only=True)
class _Seen:
    stamp: tuple[int, int, int]
    first: float
    read: float
    view: StepView


class StepScanner:
    """Scans the step folders of one run on one tier and reads again only those that changed.

    Inode and times of a folder only say that a new look is due; what counts comes from `scan`. One
    thread at a time.
    """

    def __init__(
        self,
        run: Folder,
        run_id: str,
        *,
        trusts_times: bool,
        entry_errors: Container[int | None] | None = None,
    ) -> None:
        """Works relative to `run`, which stays the caller's.

        Args:
            run: the run's folder on one tier.
            run_id: documents of another run are refused.
            trusts_times: False reads every step again that is not committed: not each shared file
                system stamps a folder when an entry is added.
            entry_errors: error numbers that concern the one step they are met at, which is then
                known by its name alone; None takes every error so. Others are the tier's.
        """
        self._trusts_times = trusts_times
        self._entry_errors = entry_errors
        self._run = run
        self._run_id = run_id
        self._seen: dict[str, _Seen] = {}

    def scan(self, tick: Callable[[], None] = lambda: None) -> list[StepView]:
        """All step folders, `.trash` included, by step.

        Args:
            tick: called after each folder, so that a watchdog sees progress.

        Raises:
            OSError: the tier fails; a `.trash` that alone cannot be read is as none.
        """
        found: dict[str, _Seen] = {}
        self._scan_inside(self._run, "", found, tick)
        try:
            with self._run.child(TRASH) as trash:
                self._scan_inside(trash, f"{TRASH}/", found, tick)
        except FileNotFoundError:
            pass
        except OSError as error:
            if not self._is_of_entry(error):
                raise
        self._seen = found
        return sorted((seen.view for seen in found.values()), key=lambda view: view.attempt)

    def _scan_inside(
        self, folder: Folder, prefix: str, found: dict[str, _Seen], tick: Callable[[], None]
    ) -> None:
        for name in folder.names():
            attempt = parse_step_folder(name)
            if attempt is None:
                continue
            path = f"{prefix}{name}"
            try:
                with folder.child(name) as step:
                    found[path] = self._known(path, step) or self._read(path, step, attempt)
            except FileNotFoundError:
                continue  # moved since the listing
            except OSError as error:
                if not self._is_of_entry(error):
                    raise
                found[path] = _unread(attempt, path, f"{folder.path}/{name}", error)
            tick()

    def _is_of_entry(self, error: OSError) -> bool:
        return self._entry_errors is None or error.errno in self._entry_errors

    def _read(self, path: str, step: Folder, attempt: Attempt) -> _Seen:
        stamp, now = _stamp(step), time.monotonic()
        old = self._seen.get(path)
        first = old.first if old is not None and old.stamp == stamp else now
        view = view_of(scan_step(step, attempt, path, self._run_id))
        return _Seen(stamp=stamp, first=first, read=now, view=view)

    def _known(self, path: str, step: Folder) -> _Seen | None:
        seen = self._seen.get(path)
        if seen is None or not (self._trusts_times or seen.view.commit):
            return None
        is_settled = seen.read - seen.first > _SETTLED_SECONDS
        return seen if is_settled and seen.stamp == _stamp(step) else None


def _unread(attempt: Attempt, path: str, where: str, error: OSError) -> _Seen:
    """A step that nothing is known of but its name: nobody copies, restores or deletes it."""
    inside = isinstance(error.filename, str) and error.filename != step_folder(attempt)
    file = f"/{error.filename}" if inside else ""
    problem = f"{where}{file}: cannot be read ({error.strerror or error})"
    view = view_of(StepRecord(attempt=attempt, folder=path, problems=(problem,)))
    now = time.monotonic()
    return _Seen(stamp=_UNREAD, first=now, read=now, view=view)


def _stamp(folder: Folder) -> tuple[int, int, int]:
    found = os.fstat(folder.fd)
    return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def observe_local(run: Folder, scanner: StepScanner | None) -> LocalView:
    """The run's folder on this node.

    Args:
        run: the open folder.
        scanner: of its step folders; None while the run is not known.

    Raises:
        OSError: the local tier cannot be read.
        Corrupt: `run.json` is damaged.
        Reject: `run.json` is of a newer release.
    """
    identity = read_identity(run)
    if identity is None or scanner is None:
        return LocalView(identity=identity)
    steps = scanner.scan()
    disk = os.fstatvfs(run.fd)
    return LocalView(
        identity=identity,
        steps=tuple(step for step in steps if not step.is_in_trash),
        trash=(*_find_unfinished(run), *(s.attempt for s in steps if s.is_in_trash)),
        is_remote=any(step.commit or step.announced for step in steps),
        states=_read_states(run, identity.run_id),
        control=read_control(run),
        used_percent=100.0 * (1 - disk.f_bavail / disk.f_blocks) if disk.f_blocks else 0.0,
    )


def _find_unfinished(run: Folder) -> tuple[Attempt, ...]:
    """As with its steps, what cannot be read on a node keeps nothing else up."""
    try:
        left = find_leftovers(run)
    except OSError:
        return ()
    return (*left.half_emptied, *left.hidden)


def _read_states(run: Folder, run_id: str) -> dict[int, TrainerState]:
    states = {}
    for name in run.names():
        rank = parse_state_file(name)
        if rank is None:
            continue
        state = _read(run, name, TrainerState)
        if state is not None and (state.run_id, state.rank) == (run_id, rank):
            states[rank] = state
    return states


def read_control(run: Folder) -> Control | None:
    """What a sidecar last told the trainer; None if nothing, or nothing that can be read."""
    return _read(run, CONTROL_DOCUMENT, Control)


def _read(run: Folder, name: str, cls: type[D]) -> D | None:
    try:
        data = run.read(name)
        return None if data is None else decode(cls, data, f"{run.path}/{name}")
    except (OSError, Corrupt, Reject):
        return None  # the writer replaces it within seconds, and it holds up nothing else


def observe_remote(
    run: Folder, near: Folder, scanner: StepScanner, run_id: str, tick: Callable[[], None]
) -> RemoteView:
    """The run's folder on the remote tier; its newest commit is not confirmed yet.

    Args:
        run: the open folder.
        near: the run's open folder on this node; its claims fill gaps of the remote tier's.
        scanner: of its step folders.
        run_id: claims of another run are left out.
        tick: called after each step folder.

    Raises:
        OSError: the remote tier cannot be read.
    """
    steps = tuple(scanner.scan(tick))
    claims = _unless_refused(partial(scan_claims, run, run_id))
    pins = _unless_refused(partial(scan_pins, run))
    left = _unless_refused(partial(find_leftovers, run)) or Leftovers()
    view = RemoteView(
        steps=steps,
        claims=merge_claims(claims or (), _scan_near_claims(near, run_id)),
        trash_age_seconds=_trash_ages(run, [step for step in steps if step.is_in_trash]),
        pins=frozenset(pins or ()),
        half_emptied=left.half_emptied,
        hidden=left.hidden,
    )
    refused = [name for name, read in ((LINEAGES, claims), (PINS, pins)) if read is None]
    return _hold_all(view, refused) if refused else view


def _unless_refused(read: Callable[[], T]) -> T | None:
    """None where a folder that is no step's cannot be opened although the tier is well."""
    try:
        return read()
    except OSError as error:
        if error.errno not in ENTRY_ERRORS:
            raise
        return None


def _hold_all(view: RemoteView, refused: list[str]) -> RemoteView:
    """As if each step were pinned and none had lain in `.trash` for long.

    Nobody knows which are, or which is the newest after a rollback; copies and commits go on.
    """
    outside = frozenset(step.attempt for step in view.steps if not step.is_in_trash)
    held = f"{' and '.join(refused)} cannot be read on the remote tier: no old step is removed"
    return replace(view, pins=outside, trash_age_seconds={}, held=held)


def _scan_near_claims(near: Folder, run_id: str) -> list[LineageClaim]:
    """Mirrors, and the claims of restores that had no remote tier; unreadable they are as none."""
    try:
        return scan_claims(near, run_id, is_local=True)
    except (OSError, TidegateError):
        return []


def _trash_ages(run: Folder, steps: list[StepView]) -> dict[Attempt, float]:
    """How long steps have lain in `.trash`, by the clock that stamped them.

    Moving a step in touches its folder; `.trash` itself is touched now: both stamps come from the
    same file system, whatever this node's clock says.
    """
    if not steps:
        return {}
    with run.child(TRASH) as trash:
        try:
            os.utime(trash.fd)
        except PermissionError:
            return {}  # somebody else's: no age is known, so none of it is emptied
        now = os.fstat(trash.fd).st_mtime
        ages = {}
        for step in steps:
            try:
                found = os.stat(step_folder(step.attempt), dir_fd=trash.fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            ages[step.attempt] = now - found.st_mtime
    return ages
