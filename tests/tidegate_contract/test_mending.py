"""What one process left half done or damaged, the next one makes whole and durable."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tidegate_contract import publish, scan
from tidegate_contract.errors import Corrupt, DamagedFile
from tidegate_contract.folder import Folder, open_step
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import (
    COMMIT,
    MANIFEST,
    METADATA,
    METADATA_REMOTE,
    QUARANTINE,
    Attempt,
    parse_quarantined_file,
    step_folder,
)
from tidegate_contract.publish import commit_step, ensure_identity, set_aside
from tidegate_contract.scan import read_commit, scan_step, scan_steps

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
ATTEMPT = Attempt(step=100, nonce="00000000000000aa")


def flip(step: Folder, name: str) -> None:
    data = bytearray(step.read(name) or b"")
    data[len(data) // 2] ^= 0x10
    with step.new_file(name) as file:
        file.write(bytes(data))
        file.publish(len(data))


@pytest.mark.parametrize("name", [COMMIT, MANIFEST])
def test_commit_over_a_damaged_document_writes_it_again(
    a_step: Callable[..., Folder], name: str
) -> None:
    with a_step() as step:
        want = commit_step(step, ATTEMPT, RUN_ID, NOW)
        flip(step, name)
        with pytest.raises(Corrupt):
            read_commit(step, ATTEMPT, RUN_ID)
        assert commit_step(step, ATTEMPT, RUN_ID, NOW) == want


def test_commit_over_a_missing_metadata_writes_it_again(a_step: Callable[..., Folder]) -> None:
    with a_step() as step:
        want = commit_step(step, ATTEMPT, RUN_ID, NOW)
        step.remove(METADATA)
        assert commit_step(step, ATTEMPT, RUN_ID, NOW) == want
        assert step.read(METADATA) == step.read(METADATA_REMOTE)


def test_commit_over_a_missing_file_waits(a_step: Callable[..., Folder]) -> None:
    with a_step() as step:
        commit_step(step, ATTEMPT, RUN_ID, NOW)
        step.remove("weights-1.distcp")
        assert commit_step(step, ATTEMPT, RUN_ID, NOW) is None


def test_commit_with_damaged_plain_metadata_names_the_file(a_step: Callable[..., Folder]) -> None:
    with a_step() as step:
        flip(step, METADATA_REMOTE)
        with pytest.raises(DamagedFile) as caught:
            commit_step(step, ATTEMPT, RUN_ID, NOW)
        assert caught.value.entry.name == METADATA_REMOTE


def test_folder_that_another_process_made_is_made_durable_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # its maker may have died, or not yet come to its own fsync
    synced: list[int] = []
    with Folder.open(tmp_path) as run:
        run.ensure_child("step").close()
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
        run.ensure_child("step").close()
        assert os.fstat(run.fd).st_ino in synced


def test_identity_that_another_process_wrote_is_made_durable_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = RunIdentity(run_id=RUN_ID, name="team-a/llama", uid=0, created_at=NOW)
    synced: list[int] = []
    with Folder.open(tmp_path) as run:
        ensure_identity(run, wanted)
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
        assert ensure_identity(run, wanted) == wanted
        assert os.fstat(run.fd).st_ino in synced


def moves_when_listed(folder: str, source: Path, target: Path) -> Callable[[Folder], list[str]]:
    """`Folder.names` of a run in which a step is moved right after a folder was listed."""
    names = Folder.names

    def listed(self: Folder) -> list[str]:
        found = names(self)
        if self.path.endswith(folder) and source.exists():
            source.rename(target)
        return found

    return listed


@pytest.mark.parametrize(("after", "is_back"), [("run", True), (".trash", True), ("run", False)])
def test_scan_sees_a_step_that_is_moved_meanwhile(
    a_step: Callable[..., Folder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: str,
    is_back: bool,
) -> None:
    a_step().close()
    name = step_folder(ATTEMPT)
    run, trash = tmp_path / "run", tmp_path / "run" / ".trash"
    trash.mkdir(parents=True)
    places = (trash / name, run / name) if is_back else (run / name, trash / name)
    (tmp_path / name).rename(places[0])
    monkeypatch.setattr(Folder, "names", moves_when_listed(after, *places))
    with Folder.open(run) as folder:
        records = scan_steps(folder, RUN_ID)
    assert [record.attempt for record in records] == [ATTEMPT]


@pytest.mark.parametrize("folder", [step_folder(ATTEMPT), f".trash/{step_folder(ATTEMPT)}"])
@pytest.mark.parametrize("is_in_trash", [True, False])
def test_step_is_opened_where_it_was_moved(
    a_step: Callable[..., Folder], tmp_path: Path, folder: str, is_in_trash: bool
) -> None:
    a_step().close()
    (tmp_path / ".trash").mkdir()
    if is_in_trash:
        (tmp_path / step_folder(ATTEMPT)).rename(tmp_path / ".trash" / step_folder(ATTEMPT))
    with Folder.open(tmp_path) as run, open_step(run, folder) as step:
        assert "seal-0.json" in step.names()


def test_step_that_is_gone_is_not_found(tmp_path: Path) -> None:
    with Folder.open(tmp_path) as run, pytest.raises(FileNotFoundError):
        open_step(run, step_folder(ATTEMPT))


def test_damaged_file_is_set_aside(a_step: Callable[..., Folder], tmp_path: Path) -> None:
    with a_step() as step, Folder.open(tmp_path) as run:
        entry = scan_step(step, ATTEMPT, "", RUN_ID).seals[1].files[0]
        flip(step, entry.name)
        damaged = step.read(entry.name)
        assert set_aside(run, step, ATTEMPT, entry)
        assert step.read(entry.name) is None
        with run.child(QUARANTINE) as quarantine:
            (name,) = quarantine.names()
            assert parse_quarantined_file(name) == ATTEMPT
            assert quarantine.read(name) == damaged


def test_second_damaged_file_of_a_name_leaves_the_first_in_quarantine(
    a_step: Callable[..., Folder], tmp_path: Path
) -> None:
    with a_step() as step, Folder.open(tmp_path) as run:
        entry = scan_step(step, ATTEMPT, "", RUN_ID).seals[1].files[0]
        for number in range(2):
            with step.new_file(entry.name) as file:
                file.write(bytes([number]) * entry.size)
                file.publish(entry.size)
            assert set_aside(run, step, ATTEMPT, entry)
        with run.child(QUARANTINE) as quarantine:
            assert {quarantine.read(name)[:1] for name in quarantine.names()} == {b"\0", b"\1"}


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "while it is moved"])
def test_file_that_was_copied_anew_is_not_set_aside(
    a_step: Callable[..., Folder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    # another reader set it aside and its holder copied it again: it may be the last good copy
    with a_step() as step, Folder.open(tmp_path) as run:
        entry = scan_step(step, ATTEMPT, "", RUN_ID).seals[1].files[0]
        want = step.read(entry.name)
        if is_late:
            first = iter([False])
            whole = publish.is_whole
            monkeypatch.setattr(publish, "is_whole", lambda *args: next(first, whole(*args)))
        assert not set_aside(run, step, ATTEMPT, entry)
        assert step.read(entry.name) == want


def test_file_that_is_gone_is_not_set_aside(a_step: Callable[..., Folder], tmp_path: Path) -> None:
    with a_step() as step, Folder.open(tmp_path) as run:
        entry = scan_step(step, ATTEMPT, "", RUN_ID).seals[1].files[0]
        step.remove(entry.name)
        assert not set_aside(run, step, ATTEMPT, entry)


def test_file_is_read_from_its_disk_before_it_is_set_aside(
    a_step: Callable[..., Folder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what the kernel keeps of a first, bad reading would say the same again
    told: list[int] = []
    monkeypatch.setattr(scan.os, "posix_fadvise", lambda *args: told.append(args[3]))
    with a_step() as step, Folder.open(tmp_path) as run:
        entry = scan_step(step, ATTEMPT, "", RUN_ID).seals[1].files[0]
        assert not set_aside(run, step, ATTEMPT, entry)
    assert told == [os.POSIX_FADV_DONTNEED]
