import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import Pin, RunIdentity
from tidegate_contract.layout import (
    COMMIT,
    MANIFEST,
    PINS,
    RUN_DOCUMENT,
    TRASH,
    Attempt,
    hidden_folder,
    parse_removed_folder,
    pin_file,
    step_folder,
)
from tidegate_contract.publish import write_pin
from tidegate_contract.restore_point import World, copy_of, decide_restore_point
from tidegate_contract.run_documents import read_identity
from tidegate_sidecar.observe import StepScanner
from tidegate_sidecar.pinning import Found, pin_step
from tidegate_sidecar.removal import empty_step, restore_step, trash_step
from tidegate_sidecar.retention import TRASH_GRACE_SECONDS, RemotePlan, decide_remote_retention
from tidegate_sidecar.tasks import CopyRanks, open_remote
from tidegate_sidecar.transfer import Meter, TokenBucket
from tidegate_sidecar.view import RemoteView

Build = Callable[..., Any]
RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"


def identity_of(path: Path) -> RunIdentity:
    with Folder.open(path) as folder:
        found = read_identity(folder)
    assert found is not None
    return found


@pytest.fixture
def two_commits(a_run: Build, a_sealed_step: Build) -> Any:
    """A run with durable steps 10 and 20, and their attempts."""
    run = a_run()
    attempts = [a_sealed_step(run.locals[0], step) for step in (10, 20)]
    tier = run.tier()
    for attempt in attempts:
        task = CopyRanks(
            attempt=attempt, ranks=frozenset({0, 1}), bytes_per_second=None, files_at_once=2
        )
        tier.copy(task, Meter(TokenBucket(None), threading.Event(), lambda _: None))
        tier.commit(attempt, datetime.now(UTC))
    return run, *attempts


def test_look_confirms_the_newest_commit(two_commits: Any) -> None:
    run, _, newest = two_commits
    view = run.tier().look(lambda: None)
    assert view.newest is not None
    assert view.newest.attempt == newest
    assert view.newest.commit is not None
    assert view.newest.commit.size_bytes > 40_000


def test_look_steps_back_from_a_commit_that_does_not_hold(two_commits: Any) -> None:
    run, older, newest = two_commits
    (run.remote / step_folder(newest) / "weights-1.distcp").unlink()
    view = run.tier().look(lambda: None)
    assert view.newest is not None
    assert view.newest.attempt == older


@pytest.mark.parametrize("damage", [COMMIT, MANIFEST, "optim-0.distcp"])
def test_retention_does_nothing_when_its_newest_commit_does_not_hold(
    two_commits: Any, damage: str
) -> None:
    run, older, newest = two_commits
    (run.remote / step_folder(newest) / damage).unlink()
    run.tier().retain(RemotePlan(confirm=newest, trash=(older,)), lambda: None)
    assert run.durable() == [10]
    assert not (run.remote / TRASH).exists()


def pin(run: Any, attempt: Attempt) -> None:
    with Folder.open(run.remote) as folder:
        write_pin(folder, Pin(run_id=RUN_ID, attempt=attempt, pinned_at=datetime.now(UTC)))


def test_c137_step_pinned_after_the_plan_was_made_is_not_moved(two_commits: Any) -> None:
    run, older, _ = two_commits
    tier = run.tier()
    plan = decide_remote_retention(tier.look(lambda: None), 1)
    assert plan.trash == (older,)
    pin(run, older)
    tier.retain(plan, lambda: None)
    assert run.durable() == [10, 20]
    assert not (run.remote / TRASH).exists()


def test_c137_step_pinned_in_trash_is_not_emptied_and_comes_back(two_commits: Any) -> None:
    run, older, newest = two_commits
    with Folder.open(run.remote) as folder:
        trash_step(folder, older)
    pin(run, older)
    tier = run.tier()
    tier.retain(RemotePlan(confirm=newest, empty=(older,)), lambda: None)
    assert (run.remote / TRASH / step_folder(older) / COMMIT).exists()
    view = tier.look(lambda: None)
    tier.retain(decide_remote_retention(view, 1), lambda: None)
    assert (run.remote / step_folder(older) / COMMIT).exists()
    assert not decide_remote_retention(tier.look(lambda: None), 1).is_needed


def test_pin_that_cannot_be_read_still_holds(two_commits: Any) -> None:
    run, older, _ = two_commits
    pin(run, older)
    (run.remote / PINS / pin_file(older)).write_bytes(b"\0 torn")
    assert run.tier().look(lambda: None).pins == {older}


def test_step_whose_place_is_taken_stays_in_trash(two_commits: Any) -> None:
    run, older, _ = two_commits
    with Folder.open(run.remote) as folder:
        trash_step(folder, older)
        with folder.ensure_child(step_folder(older)) as again:
            (Path(again.path) / "weights-0.distcp").write_bytes(b"half")
        restore_step(folder, older)
    assert (run.remote / TRASH / step_folder(older) / COMMIT).exists()


def date(folder: Path, when: datetime) -> None:
    for path in [*folder.iterdir(), folder]:
        os.utime(path, (when.timestamp(), when.timestamp()))


def test_c051_no_time_of_any_file_decides_what_is_newest_kept_or_copied(
    a_run: Build, a_sealed_step: Build
) -> None:
    run = a_run()
    now = datetime.now(UTC)
    dates = {100: now + timedelta(hours=1), 200: now - timedelta(days=365)}
    for step, when in dates.items():
        attempt = a_sealed_step(run.locals[0], step, sealed_at=when)
        date(run.locals[0] / step_folder(attempt), when)
        run.flush_once()
        date(run.remote / step_folder(attempt), when)
    assert run.durable() == [100, 200], "a folder with an old date is copied like any other"
    view = run.tier().look(lambda: None)
    assert view.newest is not None
    assert view.newest.attempt.step == 200
    assert [attempt.step for attempt in decide_remote_retention(view, 1).trash] == [100]
    copies = tuple(c for record in run.records().values() if (c := copy_of(record)))
    world = World(nodes=(frozenset({0, 1}),), local=((),), remote=copies)
    assert [c.attempt.step for c in decide_restore_point(world).candidates] == [200, 100]


def test_c006_six_folders_are_ordered_by_their_numbers(a_run: Build, a_sealed_step: Build) -> None:
    run = a_run()
    for step in (10_000, 9, 100, 9900, 10, 99):
        a_sealed_step(run.locals[0], step, size=100)
    with Folder.open(run.locals[0]) as folder:
        steps = StepScanner(folder, RUN_ID, trusts_times=True).scan()
    view = RemoteView(steps=tuple(steps))
    want = [9, 10, 99, 100, 9900, 10_000]
    assert [step.attempt.step for step in steps] == want
    assert [step.attempt.step for step in sorted(steps, key=lambda s: view.key(s) or ())] == want


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
    view = run.tier().look(lambda: None)
    assert 0 <= view.trash_age_seconds[older] < 5
    # a second more: a file system stamps by a coarser clock, which is behind this one
    hour_ago = datetime.now(UTC).timestamp() - 3601
    os.utime(run.remote / TRASH / step_folder(older), (hour_ago, hour_ago))
    view = run.tier().look(lambda: None)
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
    (folder,) = (name for name in left if "/" not in name)
    assert parse_removed_folder(folder)[0] == older
    assert sorted(left) == [folder, f"{folder}/notes.txt"]
    assert run.tier().look(lambda: None).half_emptied == ()


def test_emptying_leaves_what_is_no_file_in_a_documents_place(two_commits: Any) -> None:
    run, older, _ = two_commits
    step = run.remote / step_folder(older)
    (step / "seal-8.json").symlink_to("/etc/passwd")
    (step / "seal-9.json").mkdir()
    (step / "announced-9.json").write_text("not a document")
    with Folder.open(run.remote) as folder:
        trash_step(folder, older)
        empty_step(folder, older)
    (folder,) = (run.remote / TRASH).iterdir()
    left = {path.name for path in folder.iterdir()}
    assert left == {"seal-8.json", "seal-9.json"}


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
        open_remote(run.places(remote_root=str(root), remote="team/bytelm"))


def test_remote_folder_is_made_only_where_that_was_asked_for(a_run: Build, tmp_path: Path) -> None:
    run = a_run()
    places = {"remote_root": str(tmp_path), "remote": "new/team/bytelm"}
    with pytest.raises(Reject, match="is it mounted"):
        open_remote(run.places(**places))
    assert not (tmp_path / "new").exists()
    open_remote(run.places(**places, may_create=True)).close()
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


@pytest.mark.parametrize(
    ("owner", "call", "want"),
    [(Folder, "child", True), (Folder, "rename", True), (Folder, "remove", False)],
    ids=["before it is hidden", "while it is hidden", "once it is hidden"],
)
def test_pin_while_its_step_is_emptied_holds_or_is_refused(
    two_commits: Any, monkeypatch: pytest.MonkeyPatch, owner: type, call: str, want: bool
) -> None:
    run, older, _ = two_commits
    whole, told = getattr(owner, call), []

    def pin_first(*args: Any) -> Any:
        monkeypatch.undo()
        with Folder.open(run.remote) as folder:
            pin = Pin(run_id=RUN_ID, attempt=older, pinned_at=datetime.now(UTC))
            told.append(pin_step(folder, pin) is not Found.GONE)
        return whole(*args)

    with Folder.open(run.remote) as folder:
        trash_step(folder, older)
        monkeypatch.setattr(owner, call, pin_first)
        empty_step(folder, older)
        assert told == [want]
    assert run.durable() == ([10, 20] if want else [20])


def hide(run: Any, attempt: Attempt) -> None:
    """What an emptier leaves that dies before it has judged."""
    trash = run.remote / TRASH
    trash.mkdir()
    (run.remote / step_folder(attempt)).rename(trash / hidden_folder(attempt, "0" * 16))


@pytest.mark.parametrize("is_pinned", [True, False])
def test_step_that_a_crash_left_hidden_is_judged_anew(two_commits: Any, is_pinned: bool) -> None:
    run, older, _ = two_commits
    trash = run.remote / TRASH
    hide(run, older)
    tier = run.tier()
    assert tier.look(lambda: None).hidden == (older,)
    with Folder.open(run.remote) as folder:
        if is_pinned:
            write_pin(folder, Pin(run_id=RUN_ID, attempt=older, pinned_at=datetime.now(UTC)))
    tier.retain(decide_remote_retention(tier.look(lambda: None), 1), lambda: None)
    assert [path.name for path in trash.iterdir()] == [step_folder(older)]
    view = tier.look(lambda: None)
    old = replace(view, trash_age_seconds={older: TRASH_GRACE_SECONDS})
    tier.retain(decide_remote_retention(old, 1), lambda: None)
    assert list(trash.iterdir()) == []
    assert run.durable() == ([10, 20] if is_pinned else [20])


def test_hidden_step_comes_back_though_there_is_no_commit_left(two_commits: Any) -> None:
    # the newest commit was lost after the older one was hidden: that one is the last
    run, older, newest = two_commits
    hide(run, older)
    shutil.rmtree(run.remote / step_folder(newest))
    tier = run.tier()
    for _ in range(2):
        tier.retain(decide_remote_retention(tier.look(lambda: None), 1), lambda: None)
    assert run.durable() == [10]


def test_hidden_step_is_found_by_whoever_pins_it(two_commits: Any) -> None:
    run, older, _ = two_commits
    hide(run, older)
    with Folder.open(run.remote) as folder:
        pin = Pin(run_id=RUN_ID, attempt=older, pinned_at=datetime.now(UTC))
        assert pin_step(folder, pin) is Found.BACK
    assert run.durable() == [10, 20]
