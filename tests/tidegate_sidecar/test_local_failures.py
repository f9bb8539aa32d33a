"""A local tier that takes no write: what is sealed on it still becomes durable."""

import errno
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.layout import (
    CONTROL_DOCUMENT,
    QUARANTINE,
    seal_file,
    state_file,
    step_folder,
)
from tidegate_contract.publish import announce
from tidegate_contract.run_documents import read_document
from tidegate_contract.seal import Seal
from tidegate_contract.wire import Policy
from tidegate_sidecar import control, loop
from tidegate_sidecar.local_writes import LocalWrites
from tidegate_sidecar.lock import FlushLock

Build = Callable[..., Any]


def no_space(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write to the local tier that finds no space."""
    monkeypatch.setattr(*request.param, no_space)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    "broken",
    [(control, "write_document"), (loop, "trash_step")],
    ids=["control.json", "retention"],
    indirect=True,
)
def test_c038_full_local_tier_does_not_stop_the_flush(
    a_run: Build,
    a_sealed_step: Build,
    a_loop: Build,
    beat_until: Build,
) -> None:
    run = a_run()
    flusher = a_loop(run, policy=Policy(local_keep=1))
    for step in (10, 20):
        a_sealed_step(run.locals[0], step)
        beat_until(flusher, lambda step=step: step in run.durable())
    beat_until(flusher, lambda: "No space left" in flusher._health.words["local"])


def test_damaged_file_that_cannot_be_set_aside_does_not_stop_the_flush(
    a_run: Build,
    a_sealed_step: Build,
    a_loop: Build,
    beat_until: Build,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = a_run()
    flusher = a_loop(run)
    (run.locals[0] / QUARANTINE).write_text("a file in the folder's place")
    attempt = a_sealed_step(run.locals[0], 10)
    path = run.locals[0] / step_folder(attempt) / "optim-1.distcp"
    path.write_bytes(path.read_bytes()[::-1])
    beat_until(flusher, lambda: attempt in flusher.troubles.refused(time.monotonic()))
    a_sealed_step(run.locals[0], 20, reason="Request")
    beat_until(flusher, lambda: run.durable() == [20])
    told = [record.error for record in caplog.records if hasattr(record, "error")]
    assert any("optim-1.distcp" in why and "cannot be set aside" in why for why in told)
    assert path.exists()


def test_write_that_fails_is_told_once_and_tried_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writes, calls = LocalWrites(), []

    def fail() -> None:
        calls.append(1)
        raise OSError(errno.ENOSPC, "No space left on device", f".tmp-{len(calls)}")

    for now in (0.0, 0.5, 1.0, 2.0, 3.0):
        writes.attempt(CONTROL_DOCUMENT, fail, now)
    assert len(calls) == 3
    assert len(caplog.records) == 1
    assert writes.message.startswith(f"{CONTROL_DOCUMENT}: ")
    writes.attempt(CONTROL_DOCUMENT, lambda: None, 60.0)
    assert writes.message == ""


@pytest.mark.parametrize("thing", ["nothing", "folder", "link"])
def test_lock_needs_no_write_and_minds_nothing_in_the_folder(
    a_run: Build, monkeypatch: pytest.MonkeyPatch, thing: str
) -> None:
    path = a_run().locals[0]
    if thing == "folder":
        (path / ".flush-lock").mkdir()
    if thing == "link":
        (path / ".flush-lock").symlink_to("/nowhere")
    real = os.open

    def read_only(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with Folder.open(path) as run, Folder.open(path) as other:
        mine, theirs = FlushLock(run), FlushLock(other)
        assert mine.try_take()
        assert mine.try_take()
        assert not theirs.try_take()
        mine.release()
        assert theirs.try_take()
        theirs.release()


def test_state_that_is_no_file_does_not_stop_the_flush(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build
) -> None:
    run = a_run()
    (run.locals[0] / state_file(7)).symlink_to("/nowhere")
    a_sealed_step(run.locals[0], 10)
    beat_until(a_loop(run), run.durable)


@pytest.mark.parametrize(("damaged", "want"), [(20, False), (5, True)], ids=["newest", "older"])
def test_single_pass_tells_a_step_whose_seals_cannot_be_read(
    a_run: Build, a_sealed_step: Build, damaged: int, want: bool
) -> None:
    run = a_run()
    for step in (10, damaged):
        a_sealed_step(run.locals[0], step)
    (folder,) = run.locals[0].glob(f"step-{damaged:020d}.*")
    for seal in folder.glob("seal-*.json"):
        seal.write_bytes(seal.read_bytes()[:100])
    done = run.flush_once()
    (line,) = [line for line in done.lines if line.startswith(f"step {damaged}:")]
    assert "not copied: " in line
    assert "seal-0.json" in line
    assert "step 10: durable" in done.lines
    assert done.is_whole is want


def test_folder_that_only_a_remote_tier_can_be_is_not_tidied_as_a_nodes(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build
) -> None:
    # local and remote are swapped: what retention would remove are the durable copies
    run = a_run()
    flusher = a_loop(run, policy=Policy(local_keep=1))
    steps = [a_sealed_step(run.locals[0], step) for step in (10, 20)]
    with Folder.open(run.locals[0] / step_folder(steps[0])) as step:
        announce(step, read_document(step, Seal, seal_file(0)))
    a_sealed_step(run.locals[0], 30)
    beat_until(flusher, lambda: 30 in run.durable())
    for _ in range(3):
        flusher.beat()
    assert all((run.locals[0] / step_folder(step)).is_dir() for step in steps)
