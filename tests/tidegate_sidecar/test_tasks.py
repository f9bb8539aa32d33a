import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import COMMIT, MANIFEST, RUN_DOCUMENT, TRASH, step_folder
from tidegate_contract.scan import read_identity
from tidegate_sidecar.observe import StepScanner
from tidegate_sidecar.removal import empty_step, restore_step, trash_step
from tidegate_sidecar.retention import RemotePlan
from tidegate_sidecar.tasks import CopyRanks, Places, RemoteTier, open_remote
from tidegate_sidecar.transfer import Meter, TokenBucket

Build = Callable[..., Any]
RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"


def identity_of(path: Path) -> RunIdentity:
    with Folder.open(path) as folder:
        found = read_identity(folder)
    assert found is not None
    return found


def places_of(run: Any, **changes: Any) -> Places:
    fields: dict[str, Any] = {
        "local": str(run.locals[0]),
        "remote_root": str(run.remote),
        "remote": ".",
        "identity": identity_of(run.locals[0]),
    }
    return Places(**(fields | changes))


@pytest.fixture
def two_commits(a_run: Build, a_sealed_step: Build) -> Any:
    """A run with durable steps 10 and 20, and their attempts."""
    run = a_run()
    attempts = [a_sealed_step(run.locals[0], step) for step in (10, 20)]
    tier = RemoteTier(places_of(run))
    for attempt in attempts:
        task = CopyRanks(
            attempt=attempt, ranks=frozenset({0, 1}), bytes_per_second=None, files_at_once=2
        )
        tier.copy(task, Meter(TokenBucket(None), threading.Event(), lambda _: None))
        tier.commit(attempt, datetime.now(UTC))
    return run, *attempts


def test_look_confirms_the_newest_commit(two_commits: Any) -> None:
    run, _, newest = two_commits
    view = RemoteTier(places_of(run)).look(lambda: None)
    assert view.newest is not None
    assert view.newest.attempt == newest
    assert view.newest.commit is not None
    assert view.newest.commit.size_bytes > 40_000


def test_look_steps_back_from_a_commit_that_does_not_hold(two_commits: Any) -> None:
    run, older, newest = two_commits
    (run.remote / step_folder(newest) / "weights-1.distcp").unlink()
    view = RemoteTier(places_of(run)).look(lambda: None)
    assert view.newest is not None
    assert view.newest.attempt == older


@pytest.mark.parametrize("damage", [COMMIT, MANIFEST, "optim-0.distcp"])
def test_retention_does_nothing_when_its_newest_commit_does_not_hold(
    two_commits: Any, damage: str
) -> None:
    run, older, newest = two_commits
    (run.remote / step_folder(newest) / damage).unlink()
    RemoteTier(places_of(run)).retain(RemotePlan(confirm=newest, trash=(older,)), lambda: None)
    assert run.durable() == [10]
    assert not (run.remote / TRASH).exists()


def test_trash_keeps_the_commit_and_gives_it_back(two_commits: Any) -> None:
    run, older, _ = two_commits
    with Folder.open(run.remote) as folder:
        assert trash_step(folder, older)
        assert (run.remote / TRASH / step_folder(older) / COMMIT).exists()
        assert not trash_step(folder, older)
        restore_step(folder, older)
    assert (run.remote / step_folder(older) / COMMIT).exists()
    assert run.durable() == [10, 20]


def test_trash_tells_how_long_a_step_has_lain_there(two_commits: Any) -> None:
    run, older, _ = two_commits
    with Folder.open(run.remote) as folder:
        trash_step(folder, older)
    view = RemoteTier(places_of(run)).look(lambda: None)
    assert 0 <= view.trash_age_seconds[older] < 5
    hour_ago = datetime.now(UTC).timestamp() - 3600
    os.utime(run.remote / TRASH / step_folder(older), (hour_ago, hour_ago))
    view = RemoteTier(places_of(run)).look(lambda: None)
    assert view.trash_age_seconds[older] >= 3600


def test_emptying_leaves_names_that_the_format_does_not_know(two_commits: Any) -> None:
    run, older, newest = two_commits
    (run.remote / step_folder(older) / "notes.txt").write_text("mine")
    with Folder.open(run.remote) as folder:
        for attempt in (older, newest):
            trash_step(folder, attempt)
            empty_step(folder, attempt)
            empty_step(folder, attempt)
    left = [str(path.relative_to(run.remote / TRASH)) for path in (run.remote / TRASH).rglob("*")]
    assert sorted(left) == [step_folder(older), f"{step_folder(older)}/notes.txt"]


def test_emptying_that_was_cut_short_is_finished_later(
    two_commits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, older, _ = two_commits

    class Cut(Exception):
        pass

    def cut() -> None:
        raise Cut

    with Folder.open(run.remote) as folder:
        trash_step(folder, older)
        with pytest.raises(Cut):
            empty_step(folder, older, cut)
        assert run.durable() == [20]
        empty_step(folder, older)
    assert list((run.remote / TRASH).iterdir()) == []


@pytest.mark.parametrize("where", ["team", "team/bytelm"])
def test_remote_folder_behind_a_link_is_refused(a_run: Build, tmp_path: Path, where: str) -> None:
    run = a_run()
    root = tmp_path / "pfs"
    (root / where).parent.mkdir(parents=True)
    stolen = tmp_path / "stolen"
    (stolen if where == "team" else tmp_path).mkdir(exist_ok=True)
    if where == "team":
        run.remote.rename(stolen / "bytelm")
    else:
        run.remote.rename(stolen)
    (root / where).symlink_to(stolen)
    with pytest.raises(OSError):
        open_remote(places_of(run, remote_root=str(root), remote="team/bytelm"))


def test_remote_folder_is_made_only_where_that_was_asked_for(a_run: Build, tmp_path: Path) -> None:
    run = a_run()
    places = {"remote_root": str(tmp_path), "remote": "new/team/bytelm"}
    with pytest.raises(Reject, match="is it mounted"):
        open_remote(places_of(run, **places))
    assert not (tmp_path / "new").exists()
    open_remote(places_of(run, **places, may_create=True)).close()
    made = tmp_path / "new" / "team" / "bytelm"
    assert identity_of(made) == identity_of(run.locals[0])
    assert (made / RUN_DOCUMENT).exists()
    assert made.stat().st_mode & 0o7777 == 0o2770


def test_scanner_sees_each_change_and_reads_settled_folders_once(
    a_run: Build, a_sealed_step: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run()
    first = a_sealed_step(run.locals[0], 10)
    clock = [100.0]
    monkeypatch.setattr("tidegate_sidecar.observe.time.monotonic", lambda: clock[0])
    reads: list[str] = []
    with Folder.open(run.locals[0]) as folder:
        scanner = StepScanner(folder, RUN_ID, trusts_times=True)
        assert [step.attempt for step in scanner.scan()] == [first]
        clock[0] += 3
        scanner.scan()
        monkeypatch.setattr(
            "tidegate_sidecar.observe.scan_step", lambda *rest: reads.append(rest[2])
        )
        assert [step.attempt for step in scanner.scan()] == [first]
        assert reads == []
        monkeypatch.undo()
        (run.locals[0] / step_folder(first) / "weights-0.distcp").unlink()
        assert scanner.scan()[0].ranks == {1}


def test_bucket_without_a_rate_never_waits() -> None:
    assert TokenBucket(None).reserve(1 << 40, 0.0) == 0.0
