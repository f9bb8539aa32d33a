"""One bad entry beside the steps, on either tier: it is as none, and all else goes on."""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import (
    CONTROL_DOCUMENT,
    LINEAGES,
    PINS,
    QUARANTINE,
    TRASH,
    state_file,
)
from tidegate_contract.run_documents import read_identity
from tidegate_contract.wire import Policy
from tidegate_sidecar.observe import StepScanner, observe_local, observe_remote
from tidegate_sidecar.retention import decide_remote_retention, explain_wait
from tidegate_sidecar.tasks import CopyRanks, RemoteTier
from tidegate_sidecar.transfer import Meter, TokenBucket

Build = Callable[..., Any]
NUMBERS = [errno.EACCES, errno.EISDIR, errno.EIO, errno.ELOOP]


def identity_of(run: Any) -> RunIdentity:
    with Folder.open(run.locals[0]) as folder:
        found = read_identity(folder)
    assert found is not None
    return found


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Opening a file of this name fails with an error number."""

    def install(name: str, number: int) -> None:
        real = Folder.open_file

        def open_file(folder: Folder, asked: str) -> int:
            if asked == name:
                raise OSError(number, os.strerror(number), asked)
            return real(folder, asked)

        monkeypatch.setattr(Folder, "open_file", open_file)

    return install


def fail_folder(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Opening this folder inside the one above it fails as a sick disk does."""
    child = Folder.child

    def refuse(folder: Folder, asked: str) -> Folder:
        if f"{folder.path}/{asked}" == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), asked)
        return child(folder, asked)

    monkeypatch.setattr(Folder, "child", refuse)


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [state_file(1), CONTROL_DOCUMENT])
def test_local_document_that_cannot_be_read_is_as_none(
    a_run: Build, refuse: Build, number: int, name: str
) -> None:
    run = a_run()
    run.write_state(rank=1)
    refuse(name, number)
    with Folder.open(run.locals[0]) as folder:
        run_id = identity_of(run).run_id
        view = observe_local(folder, StepScanner(folder, run_id, trusts_times=True))
    assert set(view.states) == ({0} if name == state_file(1) else {0, 1})
    assert view.control is None


@pytest.mark.parametrize("name", [state_file(0), CONTROL_DOCUMENT])
def test_local_document_that_cannot_be_read_does_not_stop_the_flush(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build, refuse: Build, name: str
) -> None:
    run = a_run()
    refuse(name, errno.EACCES)
    a_sealed_step(run.locals[0], 10)
    beat_until(a_loop(run), run.durable)


def put_file(run: Any, name: str) -> None:
    (run.remote / name).write_text("mine")


def put_link(run: Any, name: str) -> None:
    (run.remote / name).symlink_to(run.remote.parent)


def put_endless_link(run: Any, name: str) -> None:
    (run.remote / name).symlink_to(name)


@pytest.mark.parametrize("name", [LINEAGES, PINS, TRASH, QUARANTINE])
@pytest.mark.parametrize("put", [put_file, put_link, put_endless_link])
def test_thing_in_a_remote_folders_place_does_not_stop_the_flush(
    a_run: Build, a_sealed_step: Build, name: str, put: Callable[[Any, str], None]
) -> None:
    run = a_run()
    put(run, name)
    a_sealed_step(run.locals[0], 10)
    assert run.flush_once().is_whole
    assert run.durable() == [10]


@pytest.mark.parametrize("name", [LINEAGES, PINS])
def test_nothing_remote_is_tidied_while_pins_or_lineages_cannot_be_read(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build, name: str
) -> None:
    run = a_run()
    far = run.tier()
    meter = Meter(TokenBucket(None), threading.Event(), lambda _: None)
    for attempt in [a_sealed_step(run.locals[0], step, size=100) for step in (10, 20)]:
        ranks = frozenset({0, 1})
        far.copy(
            CopyRanks(attempt=attempt, ranks=ranks, bytes_per_second=None, files_at_once=2), meter
        )
        far.commit(attempt, datetime.now(UTC))
    assert decide_remote_retention(far.look(lambda: None), 1).trash
    put_file(run, name)
    view = far.look(lambda: None)
    assert not decide_remote_retention(view, 1).is_needed
    want = f"{name} cannot be read on the remote tier: no old step is removed"
    assert explain_wait(view) == want
    flusher = a_loop(run, policy=Policy(remote_keep=1))
    a_sealed_step(run.locals[0], 30)
    beat_until(flusher, lambda: 30 in run.durable())
    assert run.durable() == [10, 20, 30]


@pytest.mark.parametrize("name", [LINEAGES, PINS])
def test_remote_tier_that_fails_is_not_taken_for_one_without_pins_and_lineages(
    a_run: Build, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = a_run()
    (run.remote / name).mkdir()
    fail_folder(monkeypatch, run.remote / name)
    run_id = identity_of(run).run_id
    with Folder.open(run.remote) as folder:
        scanner = StepScanner(folder, run_id, trusts_times=False)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            observe_remote(folder, folder, scanner, run_id, lambda: None)


def test_local_trash_that_cannot_be_read_does_not_stop_the_flush(
    a_run: Build, a_sealed_step: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run()
    a_sealed_step(run.locals[0], 10)
    (run.locals[0] / TRASH).mkdir()
    fail_folder(monkeypatch, run.locals[0] / TRASH)
    assert run.flush_once().is_whole
    assert run.durable() == [10]


def test_look_that_is_refused_leaves_no_descriptor_open(a_run: Build) -> None:
    run = a_run()
    other = replace(identity_of(run), run_id="0c0a5f0e-0000-4000-8000-000000000000")
    places = run.places(identity=other)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(Reject):
            RemoteTier(places)
    assert len(os.listdir("/proc/self/fd")) == before
