"""What a damaged file on the remote tier makes the flusher do."""

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tidegate_contract.document import encode
from tidegate_contract.errors import DamagedFile
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import (
    METADATA_REMOTE,
    QUARANTINE,
    TRASH,
    announced_file,
    step_folder,
)
from tidegate_contract.run_documents import read_identity
from tidegate_contract.scan import scan_step
from tidegate_sidecar import transfer
from tidegate_sidecar.faults import SourceError
from tidegate_sidecar.removal import empty_step, trash_step
from tidegate_sidecar.retention import decide_remote_retention
from tidegate_sidecar.tasks import CopyRanks
from tidegate_sidecar.transfer import Meter, TokenBucket, announce_ranks

Build = Callable[..., Any]


def flip(step: Folder, name: str) -> None:
    data = bytearray(step.read(name) or b"")
    data[len(data) // 2] ^= 0x10
    with step.new_file(name) as file:
        file.write(bytes(data))
        file.publish(len(data))


def identity_of(path: Any) -> RunIdentity:
    with Folder.open(path) as folder:
        found = read_identity(folder)
    assert found is not None
    return found


def test_announcement_that_was_damaged_is_written_again(a_run: Build, a_sealed_step: Build) -> None:
    run = a_run()
    attempt = a_sealed_step(run.locals[0], 10, ranks=(0,))
    name = step_folder(attempt)
    run_id = identity_of(run.locals[0]).run_id
    with Folder.open(run.locals[0]) as near, Folder.open(run.remote) as far:
        with near.child(name) as source:
            seal = scan_step(source, attempt, name, run_id).seals[0]
        with far.ensure_child(name) as target:
            announce_ranks(target, [seal])
            flip(target, announced_file(0))
            announce_ranks(target, [seal])
            assert target.read(announced_file(0)) == encode(seal)


def test_commit_with_damaged_plain_metadata_sets_it_aside(
    a_run: Build, a_sealed_step: Build
) -> None:
    run = a_run()
    attempt = a_sealed_step(run.locals[0], 10)
    tier = run.tier()
    task = CopyRanks(
        attempt=attempt, ranks=frozenset({0, 1}), bytes_per_second=None, files_at_once=1
    )
    meter = Meter(TokenBucket(None), threading.Event(), lambda _: None)
    tier.copy(task, meter)
    with Folder.open(run.remote) as far, far.child(step_folder(attempt)) as step:
        flip(step, METADATA_REMOTE)
        with pytest.raises(DamagedFile):
            tier.commit(attempt, datetime.now(UTC))
        assert METADATA_REMOTE not in step.names()
        assert len(far.child(QUARANTINE).names()) == 1
    tier.copy(task, meter)
    tier.commit(attempt, datetime.now(UTC))
    newest = tier.look(lambda: None).newest
    assert newest is not None and newest.attempt == attempt


def test_emptying_a_step_that_vanishes_meanwhile_is_done(
    a_run: Build, a_sealed_step: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a call of a process that was killed while it did the same arrives late
    run = a_run()
    attempt = a_sealed_step(run.locals[0], 10)
    rmdir = os.rmdir

    def twice(name: str, *, dir_fd: int) -> None:
        rmdir(name, dir_fd=dir_fd)
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", twice)
    with Folder.open(run.locals[0]) as folder:
        trash_step(folder, attempt)
        empty_step(folder, attempt)
        assert folder.child(TRASH).names() == []


def test_step_whose_name_is_taken_in_trash_waits_until_that_is_emptied(
    a_view: Build, a_commit: Build, a_remote: Build
) -> None:
    # a slow flusher made the folder again; moving it would fail each time
    folder = f"{TRASH}/{step_folder(a_view(5).attempt)}"
    again, newest = a_view(5, sealed={0: 100}), a_commit(6)
    remote = a_remote(a_view(5, folder=folder), again, newest)
    assert not decide_remote_retention(remote, 1).is_needed
    assert decide_remote_retention(a_remote(again, newest), 1).trash == (again.attempt,)


@pytest.mark.parametrize("is_once", [True, False], ids=["one bad read", "damaged"])
def test_local_file_is_set_aside_only_if_it_reads_damaged_again(
    a_run: Build, a_sealed_step: Build, monkeypatch: pytest.MonkeyPatch, is_once: bool
) -> None:
    run = a_run()
    attempt = a_sealed_step(run.locals[0], 10)
    tier = run.tier()
    name = "weights-0.distcp"
    path = run.locals[0] / step_folder(attempt) / name
    if is_once:
        readv = os.readv

        def read_badly(fd: int, buffers: list[memoryview]) -> int:
            size = readv(fd, buffers)
            if size and os.path.samestat(os.fstat(fd), path.stat()):
                buffers[0][0] ^= 1
            return size

        monkeypatch.setattr(transfer.os, "readv", read_badly)
    else:
        path.write_bytes(path.read_bytes()[::-1])
    meter = Meter(TokenBucket(None), threading.Event(), lambda _: None)
    task = CopyRanks(attempt=attempt, ranks=frozenset({0}), bytes_per_second=None, files_at_once=1)
    with pytest.raises(SourceError, match="again" if is_once else name):
        tier.copy(task, meter)
    assert path.exists() is is_once
