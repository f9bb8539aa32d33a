"""Bugs to be planted in production: each must make some scenario break an invariant.

A mutation replaces what production calls, for as long as its context lasts. Several rules have a
net below them (a COMMIT counts only with every file at its size; a plan is confirmed before it is
carried out); where the net alone would hide the bug, the mutation takes the net away as well and
says so.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest import mock

from tidegate_contract import folder, layout, publish, restore_point, scan
from tidegate_contract.folder import Folder, NewFile
from tidegate_contract.layout import Attempt, step_folder
from tidegate_contract.restore_point import Copy
from tidegate_contract.run_documents import scan_pins
from tidegate_contract.seal import FileEntry, Manifest, Seal, build_manifest
from tidegate_crash import flusher, restoring
from tidegate_crash.stage import NOW
from tidegate_sidecar import removal, tasks, transfer, view
from tidegate_sidecar.retention import RemotePlan, decide_remote_retention
from tidegate_sidecar.tasks import Places
from tidegate_sidecar.view import CommitView, RemoteView, StepView


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A planted bug.

    Attributes:
        name: for people.
        plant: the bug is there inside this context.
        scenario: the cheapest that shows it.
        depth: of the exploration that shows it.
    """

    name: str
    plant: Callable[[], AbstractContextManager[None]]
    scenario: str
    depth: int = 0


@contextmanager
def _patched(*places: tuple[object, str, object]) -> Iterator[None]:
    with ExitStack() as stack:
        for target, name, value in places:
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def _of(module: ModuleType, name: str) -> Any:
    """What a module works with now; on the simulated disk that is not what it imported."""
    return getattr(module, name)


def _no_wrong_size(_step: Folder, _entries: tuple[FileEntry, ...]) -> None:
    return None


# Publishing.


def without_file_fsync() -> AbstractContextManager[None]:
    """A file takes its name before its bytes are durable."""

    def published(self: Any, size: int, *, is_exclusive: bool = False) -> bool:
        fd, self.fd = self.fd, -1
        _of(folder, "os").close(fd)
        if is_exclusive:
            return bool(self._folder.link_new(self.name, self._final))
        self._folder.rename(self.name, self._final)
        self._folder.sync()
        return True

    return _patched((NewFile, "publish", published))


def without_folder_fsync() -> AbstractContextManager[None]:
    """Names are never made durable."""
    return _patched((Folder, "sync", lambda _self: None))


def with_shared_temp_names() -> AbstractContextManager[None]:
    """Every try writes the same unfinished file."""
    return _patched((folder, "temp_file", lambda final, _token: layout.temp_file(final, "0" * 16)))


def receipts_before_files() -> AbstractContextManager[None]:
    """A flusher vouches for files that it has yet to copy; sizes, the net below, do not count."""
    whole = transfer.copy_ranks

    def copied(source: Folder, target: Folder, seals: Any, *rest: Any) -> int:
        seals = list(seals)
        for seal in seals:
            publish.write_seal(target, seal)
        return whole(source, target, seals, *rest)

    return _patched((tasks, "copy_ranks", copied), (scan, "find_wrong_size", _no_wrong_size))


# Committing.


def commit_before_receipts() -> AbstractContextManager[None]:
    """A committer takes announcements for receipts; sizes, the net below, do not count."""

    def early(step: Folder, attempt: Attempt, run_id: str) -> Manifest | None:
        record = scan.scan_step(step, attempt, step.path, run_id)
        known: dict[int, Seal] = record.announced | record.seals
        return build_manifest(known) if record.is_sealed_by_all else None

    return _patched(
        (publish, "committable_manifest", early),
        (publish, "_publish_metadata", lambda _step, _manifest: None),
        (scan, "find_wrong_size", _no_wrong_size),
    )


def manifest_by_writer() -> AbstractContextManager[None]:
    """A manifest says who wrote it, so two committers write two."""
    whole = _of(publish, "committable_manifest")

    def signed(step: Folder, attempt: Attempt, run_id: str) -> Manifest | None:
        manifest = whole(step, attempt, run_id)
        writer = _of(folder, "secrets").token_hex(8)
        return replace(manifest, torch_version=f"2.15.0 by {writer}") if manifest else None

    return _patched((publish, "committable_manifest", signed))


def act_without_fsync() -> AbstractContextManager[None]:
    """Whoever acts on a COMMIT has only seen it."""
    return _patched(
        (publish, "confirm_commit", scan.read_commit), (removal, "confirm_commit", scan.read_commit)
    )


def commit_matched_by_step() -> AbstractContextManager[None]:
    """A flusher takes another attempt's COMMIT of the same step for its own."""

    def find(self: RemoteView, attempt: Attempt) -> StepView | None:
        return next((step for step in self.steps if step.attempt.step == attempt.step), None)

    def key(self: RemoteView, step: StepView) -> tuple[int, int, str] | None:
        return None if step.lineage is None else (0, step.attempt.step, "")

    return _patched((RemoteView, "find", find), (RemoteView, "key", key))


def without_run_check() -> AbstractContextManager[None]:
    """A flusher of an earlier run works in the folder of its successor."""

    def opened(places: Places) -> Folder:
        with Folder.open(places.remote_root) as root:
            return root.child(places.remote)

    return _patched((tasks, "open_remote", opened))


# Removing.


def retention_counts_uncommitted() -> AbstractContextManager[None]:
    """Retention keeps the newest steps, whether or not they are commits."""

    def counted(remote: RemoteView, keep: int) -> RemotePlan:
        fake = CommitView(committed_at=NOW, manifest_sha256="", size_bytes=0)
        steps = tuple(
            replace(s, commit=fake) if s.lineage is not None and not s.is_in_trash else s
            for s in remote.steps
        )
        outside = [step for step in steps if step.commit and not step.is_in_trash]
        newest = max(outside, key=lambda s: remote.key(s) or (0, 0, ""), default=None)
        plan = decide_remote_retention(replace(remote, steps=steps, newest=newest), keep)
        return replace(plan, confirm=remote.newest.attempt if remote.newest else None)

    return _patched((flusher, "decide_remote_retention", counted))


def unlink_before_rename() -> AbstractContextManager[None]:
    """Retention unlinks a step's files under its name and moves the rest."""
    whole = _of(tasks, "trash_step")

    def torn(run: Folder, attempt: Attempt) -> bool:
        try:
            step = run.child(step_folder(attempt))
        except FileNotFoundError:
            return False
        with step:
            for name in step.names():
                step.remove(name)
        return bool(whole(run, attempt))

    return _patched((tasks, "trash_step", torn))


def empties_in_place() -> AbstractContextManager[None]:
    """A step of `.trash` is emptied under the name that a person may move back."""

    def in_place(run: Folder, trash: Folder, attempt: Attempt) -> None:
        if attempt not in scan_pins(run):
            removal._unlink(trash, step_folder(attempt), lambda: None)

    return _patched((removal, "_hide", in_place))


def empties_what_may_go_back() -> AbstractContextManager[None]:
    """Files are removed under the name from which a pinned step is given back."""

    def judge(run: Folder, trash: Folder, attempt: Attempt, token: str) -> None:
        hidden = layout.hidden_folder(attempt, token)
        if attempt in scan_pins(run):
            with suppress(FileNotFoundError):
                trash.rename(hidden, step_folder(attempt))
        else:
            removal._unlink(trash, hidden, lambda: None)

    return _patched((removal, "_judge", judge))


def quarantine_moves_the_folder() -> AbstractContextManager[None]:
    """One damaged file takes its whole step with it."""

    def moved(run: Folder, _step: Folder, attempt: Attempt, _entry: FileEntry) -> bool:
        name = step_folder(attempt)
        with run.ensure_child(layout.QUARANTINE) as quarantine:
            run.rename(name, name, quarantine)
            quarantine.sync()
        run.sync()
        return True

    return _patched((restoring, "set_aside", moved), (tasks, "set_aside", moved))


# Restoring.


class _BySteps(dict[Attempt, Copy]):
    """Copies that are found by their step alone."""

    def get(self, attempt: Attempt, default: Any = None) -> Any:
        return next((self[known] for known in self if known.step == attempt.step), default)


def restore_ignores_the_attempt() -> AbstractContextManager[None]:
    """Any copy of the same step serves."""
    whole = restore_point._best_copies
    return _patched((restore_point, "_best_copies", lambda copies: _BySteps(whole(copies))))


def order_ignores_the_lineage() -> AbstractContextManager[None]:
    """Newer means the higher step."""

    def by_step(attempt: Attempt, _lineage: int, _claims: Any) -> tuple[int, int, str]:
        return (0, attempt.step, attempt.nonce)

    return _patched((restore_point, "order_key", by_step), (view, "order_key", by_step))


MUTATIONS = (
    Mutation(name="no fsync of files", plant=without_file_fsync, scenario="save"),
    Mutation(name="no fsync of folders", plant=without_folder_fsync, scenario="save"),
    Mutation(name="shared temp names", plant=with_shared_temp_names, scenario="flush"),
    Mutation(name="receipts before files", plant=receipts_before_files, scenario="flush"),
    Mutation(name="COMMIT before receipts", plant=commit_before_receipts, scenario="early"),
    Mutation(name="manifest by its writer", plant=manifest_by_writer, scenario="race", depth=1),
    Mutation(
        name="acts on a COMMIT unsynced", plant=act_without_fsync, scenario="retention", depth=1
    ),
    Mutation(name="COMMIT by step", plant=commit_matched_by_step, scenario="same-step"),
    Mutation(name="no run check", plant=without_run_check, scenario="recreate"),
    Mutation(name="counts uncommitted", plant=retention_counts_uncommitted, scenario="half"),
    Mutation(name="unlink before rename", plant=unlink_before_rename, scenario="undo", depth=1),
    Mutation(name="empties in place", plant=empties_in_place, scenario="pins-empty", depth=1),
    Mutation(
        name="empties what may go back",
        plant=empties_what_may_go_back,
        scenario="pins-empty-twice",
        depth=1,
    ),
    Mutation(name="quarantines folders", plant=quarantine_moves_the_folder, scenario="flip-half"),
    Mutation(name="ignores the attempt", plant=restore_ignores_the_attempt, scenario="mixed"),
    Mutation(name="ignores the lineage", plant=order_ignores_the_lineage, scenario="rollback"),
)
"""Every rule that a planted bug can break."""
