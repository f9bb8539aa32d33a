"""Single steps that cannot be opened, read or emptied: they are left alone, all else goes on."""

import errno
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import ENTRY_ERRORS, Folder
from tidegate_contract.layout import COMMIT, TRASH, Attempt, step_folder
from tidegate_contract.wire import Phase, Policy
from tidegate_sidecar import tasks
from tidegate_sidecar.decide import Copy, Why
from tidegate_sidecar.observe import StepScanner
from tidegate_sidecar.removal import do_each, empty_step, trash_step
from tidegate_sidecar.retention import (
    TRASH_GRACE_SECONDS,
    RemotePlan,
    decide_local_retention,
    decide_remote_retention,
)
from tidegate_sidecar.tasks import CopyRanks, Lane, Retain
from tidegate_sidecar.transfer import Meter, TokenBucket
from tidegate_sidecar.view import RemoteView, StepView

Build = Callable[..., Any]
RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
OF_TIER = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)


@pytest.fixture
def commits(a_run: Build, a_sealed_step: Build) -> Callable[..., tuple[Any, list[Attempt]]]:
    """Makes a run with these steps durable, and gives it with their attempts."""

    def build(*steps: int) -> tuple[Any, list[Attempt]]:
        run = a_run()
        attempts = [a_sealed_step(run.locals[0], step, size=100) for step in steps]
        tier = run.tier()
        for attempt in attempts:
            task = CopyRanks(
                attempt=attempt, ranks=frozenset({0, 1}), bytes_per_second=None, files_at_once=2
            )
            tier.copy(task, Meter(TokenBucket(None), threading.Event(), lambda _: None))
            tier.commit(attempt, datetime.now(UTC))
        return run, attempts

    return build


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, int], None]:
    """Opening a name (a folder, or a file of a folder) fails with an error number."""

    def install(inside: str, name: str, number: int) -> None:
        child, read = Folder.child, Folder.read

        def check(folder: Folder, asked: str) -> None:
            if asked == name and folder.path.endswith(inside):
                raise OSError(number, os.strerror(number), asked)

        def new_child(folder: Folder, asked: str) -> Folder:
            check(folder, asked)
            return child(folder, asked)

        def new_read(folder: Folder, asked: str, *rest: int) -> bytes | None:
            check(folder, asked)
            return read(folder, asked, *rest)

        monkeypatch.setattr(Folder, "child", new_child)
        monkeypatch.setattr(Folder, "read", new_read)

    return install


def scan(path: Path, **changes: Any) -> dict[int, StepView]:
    with Folder.open(path) as folder:
        scanner = StepScanner(folder, RUN_ID, **({"trusts_times": True} | changes))
        return {step.attempt.step: step for step in scanner.scan()}


@pytest.mark.parametrize("number", [errno.EACCES, *OF_TIER], ids=errno.errorcode.get)
@pytest.mark.parametrize("what", ["folder", "seal-1.json", "announced-1.json"])
def test_local_step_that_cannot_be_read_is_a_problem_of_its_own(
    a_run: Build, a_sealed_step: Build, refuse: Build, number: int, what: str
) -> None:
    path = a_run().locals[0]
    bad, _ = (a_sealed_step(path, step, size=100) for step in (10, 20))
    (path / step_folder(bad) / "announced-1.json").write_text("")
    name = step_folder(bad)
    refuse(*(("", name) if what == "folder" else (name, what)), number)
    seen = scan(path)
    where = str(path / name / ("" if what == "folder" else what))
    assert seen[10].problems == (f"{where}: cannot be read ({os.strerror(number)})",)
    assert (seen[10].lineage, seen[10].sealed) == (None, {})
    assert seen[20].ranks == {0, 1}


def test_step_that_could_not_be_read_is_read_again_though_its_folder_did_not_change(
    a_run: Build, a_sealed_step: Build, refuse: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_run().locals[0]
    name = step_folder(a_sealed_step(path, 10, size=100))
    clock = [100.0]
    monkeypatch.setattr("tidegate_sidecar.observe.time.monotonic", lambda: clock[0])
    with Folder.open(path) as folder:
        scanner = StepScanner(folder, RUN_ID, trusts_times=True)
        with pytest.MonkeyPatch.context() as patch:
            refuse(name, "seal-0.json", errno.EIO)
            for _ in range(3):
                assert scanner.scan()[0].problems
                clock[0] += 3
            patch.undo()
        monkeypatch.undo()
        assert scanner.scan()[0].ranks == {0, 1}


@pytest.mark.parametrize("what", ["folder", "seal-1.json", TRASH])
@pytest.mark.parametrize("number", [*sorted(ENTRY_ERRORS), *OF_TIER], ids=errno.errorcode.get)
def test_remote_step_that_refuses_is_left_and_a_tier_that_fails_is_told(
    commits: Build, refuse: Build, number: int, what: str
) -> None:
    run, (bad, good) = commits(10, 20)
    with Folder.open(run.remote) as folder:
        folder.ensure_child(TRASH).close()
    name = step_folder(bad)
    places = {"folder": ("/remote", name), "seal-1.json": (name, what), TRASH: ("/remote", TRASH)}
    tier = run.tier()
    refuse(*places[what], number)
    if number in OF_TIER:
        with pytest.raises(OSError, match=os.strerror(number)):
            tier.look(lambda: None)
        return
    view = tier.look(lambda: None)
    assert view.newest is not None
    assert view.newest.attempt == good
    if what != TRASH:
        (seen,) = (step for step in view.steps if step.attempt == bad)
        assert seen.problems
        assert seen.lineage is None
        assert not decide_remote_retention(view, 1).is_needed


@pytest.mark.parametrize("tier", ["local", "remote"])
@pytest.mark.parametrize("kind", ["step", "trash", "step in trash"])
def test_file_in_a_folders_place_does_not_stop_the_flush(
    a_run: Build, a_sealed_step: Build, attempt_of: Build, tier: str, kind: str
) -> None:
    run = a_run()
    place = run.locals[0] if tier == "local" else run.remote
    name = step_folder(attempt_of(5))
    if kind == "step in trash":
        (place / TRASH).mkdir()
    names = {"step": name, "trash": TRASH, "step in trash": f"{TRASH}/{name}"}
    (place / names[kind]).write_text("mine")
    good = step_folder(a_sealed_step(run.locals[0], 20, size=100))
    run.flush_once()
    assert (run.remote / good / COMMIT).exists()
    assert (place / names[kind]).read_text() == "mine"
    if kind != "trash":
        assert scan(place, entry_errors=ENTRY_ERRORS)[5].problems


def test_trash_of_another_owner_has_no_ages(
    commits: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, (old, _) = commits(10, 20)
    with Folder.open(run.remote) as folder:
        trash_step(folder, old)
    tier = run.tier()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("tidegate_sidecar.observe.os.utime", refuse)
    assert not tier.look(lambda: None).trash_age_seconds


@pytest.mark.parametrize(("problems", "want"), [((), [10]), (("cannot be read",), [])])
def test_folder_whose_seals_may_exist_unread_is_not_abandoned(
    make: Any, problems: tuple[str, ...], want: list[int]
) -> None:
    silent = make.view(10, lineage=None, sealed={}, problems=problems)
    gone = decide_local_retention([silent, make.view(20)], RemoteView(), keep=1, lineage=1)
    assert [attempt.step for attempt in gone] == want


def left_in_trash(run: Any) -> list[int]:
    return sorted(int(path.name[5:25]) for path in (run.remote / TRASH).iterdir())


def spoil(folder: Path, how: str) -> None:
    if how == "commit folder":
        (folder / COMMIT).unlink()
        (folder / COMMIT).mkdir()
    else:
        (folder / how).write_text("mine")


@pytest.mark.parametrize("how", [".nfs0001", "notes.txt", "commit folder"])
def test_step_with_names_that_stay_does_not_keep_trash_from_being_emptied(
    commits: Build, how: str
) -> None:
    run, attempts = commits(10, 20, 30, 40)
    spoil(run.remote / step_folder(attempts[0]), how)
    with Folder.open(run.remote) as folder:
        for attempt in attempts[:3]:
            trash_step(folder, attempt)
    plan = RemotePlan(confirm=attempts[3], empty=tuple(attempts[:3]), is_gradual=True)
    tier, left = run.tier(), []
    for _ in range(3):
        tier.retain(plan, lambda: None)
        left.append(left_in_trash(run))
    assert left == [[10, 20, 30], [10, 30], [10]]
    kept = {path.name for path in (run.remote / TRASH).glob("*/*")}
    assert kept == {COMMIT if how == "commit folder" else how}


@pytest.mark.parametrize("number", [errno.EISDIR, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("change", ["restore_step", "trash_step", "empty_step"])
def test_step_that_refuses_its_removal_does_not_stop_the_others(
    commits: Build, monkeypatch: pytest.MonkeyPatch, change: str, number: int
) -> None:
    run, (first, second, newest) = commits(10, 20, 30)
    whole = getattr(tasks, change)

    def refuse(run: Folder, attempt: Attempt, *rest: Any) -> Any:
        if attempt == first:
            raise OSError(number, os.strerror(number))
        return whole(run, attempt, *rest)

    monkeypatch.setattr(tasks, change, refuse)
    field = change.removesuffix("_step")
    tier = run.tier()
    if change != "trash_step":
        with Folder.open(run.remote) as folder:
            trash_step(folder, second)
    steps: dict[str, Any] = {field: (first, second)}
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(number)):
            tier.retain(RemotePlan(confirm=newest, **steps), lambda: None)
        return
    tier.retain(RemotePlan(confirm=newest, **steps), lambda: None)
    assert run.durable() == ([10, 20, 30] if change != "empty_step" else [10, 30])
    assert (run.remote / step_folder(second)).exists() is (change == "restore_step")
    steps[field] = (first,)
    with pytest.raises(OSError, match=os.strerror(number)):
        tier.retain(RemotePlan(confirm=newest, **steps), lambda: None)


@pytest.mark.parametrize("document", [COMMIT, "seal-0.json"])
def test_emptying_touches_nothing_of_a_step_with_a_document_that_cannot_be_read(
    commits: Build, refuse: Build, document: str
) -> None:
    run, (old, _) = commits(10, 20)
    with Folder.open(run.remote) as folder:
        trash_step(folder, old)
        path = run.remote / TRASH / step_folder(old)
        want = sorted(path.iterdir())
        refuse(step_folder(old), document, errno.EACCES)
        with pytest.raises(PermissionError):
            empty_step(folder, old)
    assert sorted(path.iterdir()) == want


def test_removals_go_on_past_one_that_fails_and_it_is_told() -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        do_each([fail, lambda: done.append(1), fail, lambda: done.append(2)])
    assert done == [1, 2]


def test_local_step_in_trash_that_refuses_does_not_stop_local_retention(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build, attempt_of: Build
) -> None:
    run = a_run()
    near = run.locals[0]
    (near / TRASH).mkdir()
    (near / TRASH / step_folder(attempt_of(1))).write_text("mine")
    flusher = a_loop(run, policy=Policy(local_keep=1))
    old = a_sealed_step(near, 10, size=100)
    beat_until(flusher, lambda: run.durable() == [10])
    a_sealed_step(near, 20, size=100)
    beat_until(flusher, lambda: not (near / step_folder(old)).exists())
    beat_until(flusher, lambda: "Not a directory" in flusher._health.words["local"])


class Killed(BaseException):
    pass


@pytest.mark.parametrize("when", ["whole", "killed at the move"])
def test_grace_of_a_trashed_step_begins_before_it_is_moved(
    commits: Build, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    run, (old, _) = commits(10, 20)
    long_ago = datetime.now(UTC).timestamp() - 2 * TRASH_GRACE_SECONDS
    os.utime(run.remote / step_folder(old), (long_ago, long_ago))
    rename = Folder.rename

    def killed(*args: Any) -> None:
        rename(*args)
        raise Killed

    with Folder.open(run.remote) as folder:
        if when == "whole":
            trash_step(folder, old)
        else:
            monkeypatch.setattr(Folder, "rename", killed)
            with pytest.raises(Killed):
                trash_step(folder, old)
    view = run.tier().look(lambda: None)
    assert 0 <= view.trash_age_seconds[old] < 60
    assert not decide_remote_retention(view, 1).empty


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.RESTORING, Phase.STARTING])
def test_nothing_is_tidied_on_either_tier_while_a_trainer_restores(
    a_run: Build,
    a_sealed_step: Build,
    a_loop: Build,
    beat_until: Build,
    monkeypatch: pytest.MonkeyPatch,
    phase: Phase,
) -> None:
    run = a_run()
    places = (run.locals[0], run.remote)
    names = []
    for step in (10, 20):
        names.append(step_folder(a_sealed_step(places[0], step, size=100)))
        run.flush_once()
    run.write_state(0, rank=0, phase=phase)
    flusher = a_loop(run, policy=Policy(local_keep=1, remote_keep=1))
    started: list[object] = []
    start = flusher._workers.start

    def note(lane: Lane, task: object) -> None:
        started.append(task)
        start(lane, task)

    monkeypatch.setattr(flusher._workers, "start", note)
    beats = iter(range(1000))
    is_tidy = phase is Phase.TRAINING
    old = [place / names[0] for place in places]
    beat_until(
        flusher,
        lambda: (
            not any(path.exists() for path in old)
            if is_tidy
            else flusher.remote is not None and next(beats) > 2
        ),
    )
    assert [path.exists() for path in old] == [not is_tidy] * 2
    assert any(isinstance(task, Retain) for task in started) is is_tidy


def test_local_copy_that_is_being_copied_stays_until_the_copy_ends(
    a_run: Build,
    a_sealed_step: Build,
    a_loop: Build,
    beat_until: Build,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = a_run()
    near = run.locals[0]
    paths = {}
    for step in (5, 10, 20):
        paths[step] = near / step_folder(a_sealed_step(near, step, size=100))
        run.flush_once()
    flusher = a_loop(run, policy=Policy(local_keep=1))
    old = Attempt(step=10, nonce=f"{10:016x}")
    flusher._copying = Copy(attempt=old, ranks=frozenset({0}), why=Why.URGENT)
    running = flusher._workers.running
    monkeypatch.setattr(
        flusher._workers,
        "running",
        lambda lane: flusher._copying if lane is Lane.COPY else running(lane),
    )
    beat_until(flusher, lambda: not paths[5].exists())
    assert paths[10].exists()
    flusher._copying = None
    beat_until(flusher, lambda: not paths[10].exists())
    assert paths[20].exists()
