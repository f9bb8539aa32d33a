"""Folders that somebody prepared to hurt, read by the production reader."""

import errno
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.document import MAX_BYTES, decode, encode
from tidegate_contract.errors import Corrupt
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, Pin, RunIdentity, Trained
from tidegate_contract.layout import (
    COMMIT,
    LINEAGES,
    MANIFEST,
    METADATA,
    PINS,
    RUN_DOCUMENT,
    TRASH,
    Attempt,
    lineage_file,
    pin_file,
    seal_file,
    step_folder,
    trained_file,
)
from tidegate_contract.publish import (
    claim_lineage,
    commit_step,
    ensure_identity,
    note_trained,
    write_document,
    write_pin,
)
from tidegate_contract.run_documents import (
    read_identity,
    scan_claims,
    scan_pins,
    scan_trained,
)
from tidegate_contract.scan import read_commit, scan_steps, verify_file
from tidegate_contract.seal import Seal, file_entry
from tidegate_contract.verify import verify_step

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
ATTEMPT = Attempt(step=100, nonce="00000000000000aa")
OTHER = Attempt(step=100, nonce="00000000000000bb")


def symlink(path: Path) -> None:
    """To a file that is right, but not here."""
    aside = path.with_name(f"aside-{path.name}")
    path.rename(aside)
    path.symlink_to(aside)


def absolute_symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def dangling_symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def endless_symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    path.unlink()
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:  # its path has 108 bytes at most
        server.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def endless_device(path: Path) -> None:
    path.unlink()
    make_device(path, os.makedev(1, 5))  # zeros without end


def unserved_device(path: Path) -> None:
    path.unlink()
    make_device(path, os.makedev(60, 7))


def make_device(path: Path, number: int) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, number)
    except PermissionError:
        pytest.skip("devices need root")


def endless_file(path: Path) -> None:
    os.truncate(path, 1 << 42)  # sparse


def empty_file(path: Path) -> None:
    os.truncate(path, 0)


DAMAGES = [
    symlink,
    absolute_symlink,
    dangling_symlink,
    endless_symlink,
    fifo,
    unix_socket,
    directory,
    endless_device,
    unserved_device,
    endless_file,
    empty_file,
]
every_damage = pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
Damage = Callable[[Path], None]


@pytest.fixture
def step(a_step: Callable[..., Folder]) -> Iterator[Folder]:
    """A committed step of two ranks in a run's folder."""
    with a_step() as found:
        assert commit_step(found, ATTEMPT, RUN_ID, NOW) is not None
        yield found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Folder]:
    """A run's folder with its documents."""
    with Folder.open(tmp_path) as found:
        ensure_identity(found, RunIdentity(run_id=RUN_ID, name="team/run", uid=0, created_at=NOW))
        for number in (1, 2):
            claim = LineageClaim(run_id=RUN_ID, number=number, explicit=True, claimed_at=NOW)
            assert claim_lineage(found, claim)
            assert note_trained(found, Trained(run_id=RUN_ID, number=number, trained_at=NOW))
        write_pin(found, Pin(run_id=RUN_ID, attempt=ATTEMPT, pinned_at=NOW))
        yield found


@every_damage
@pytest.mark.parametrize(
    "name", ["seal-1.json", "announced-1.json", COMMIT, MANIFEST, "weights-1.distcp", METADATA]
)
def test_thing_in_a_step_files_place_is_named_and_never_counts(
    step: Folder, tmp_path: Path, name: str, damage: Damage
) -> None:
    damage(Path(step.path, name))
    with Folder.open(tmp_path) as run:
        (record,) = scan_steps(run, RUN_ID)
    named = [problem for problem in record.problems if name in problem]
    assert named
    assert all(len(problem) < 1000 for problem in record.problems)
    assert any(name in problem for problem in verify_step(step, ATTEMPT, RUN_ID))
    if not name.endswith(".json") or name == MANIFEST:
        assert record.committed is None
        with pytest.raises(Corrupt, match=name):
            read_commit(step, ATTEMPT, RUN_ID)
    if name == "seal-1.json":
        assert set(record.seals) == {0}
        step.remove(COMMIT)
        assert commit_step(step, ATTEMPT, RUN_ID, NOW) is None


@every_damage
def test_thing_in_a_data_files_place_is_not_verified(step: Folder, damage: Damage) -> None:
    found = read_commit(step, ATTEMPT, RUN_ID)
    assert found is not None
    entry = next(entry for entry in found.manifest.files if entry.name == "weights-1.distcp")
    damage(Path(step.path, entry.name))
    with pytest.raises(Corrupt, match=entry.name):
        verify_file(step, entry)


@every_damage
def test_thing_in_a_run_documents_place_gives_nothing_to_act_upon(
    run: Folder, damage: Damage
) -> None:
    damage(Path(run.path, RUN_DOCUMENT))
    with pytest.raises(Corrupt, match=RUN_DOCUMENT):
        read_identity(run)
    damage(Path(run.path, LINEAGES, lineage_file(2)))
    damage(Path(run.path, LINEAGES, trained_file(1)))
    damage(Path(run.path, PINS, pin_file(ATTEMPT)))
    assert [(claim.number, claim.explicit) for claim in scan_claims(run, RUN_ID)] == [
        (1, True),
        (2, False),
    ]
    assert scan_trained(run, RUN_ID) == {2}
    assert scan_pins(run) == {ATTEMPT: None}


@pytest.mark.parametrize(
    "damage", [symlink, absolute_symlink, dangling_symlink, fifo, unix_socket, empty_file]
)
def test_thing_in_a_step_folders_place_is_named(
    run: Folder, a_step: Callable[..., Folder], damage: Damage
) -> None:
    a_step().close()
    name = step_folder(OTHER)
    path = Path(run.path, name)
    path.touch()
    damage(path)
    records = {record.attempt: record for record in scan_steps(run, RUN_ID)}
    assert records[ATTEMPT].is_sealed_by_all
    (problem,) = records[OTHER].problems
    assert f"{name}: cannot be opened" in problem
    assert not records[OTHER].seals


@pytest.mark.parametrize("damage", [absolute_symlink, endless_symlink, fifo, empty_file])
def test_thing_in_trashs_place_hides_no_step(
    run: Folder, a_step: Callable[..., Folder], damage: Damage
) -> None:
    a_step().close()
    path = Path(run.path, TRASH)
    path.touch()
    damage(path)
    (record,) = scan_steps(run, RUN_ID)
    assert record.is_sealed_by_all


def test_trash_that_fails_to_answer_is_not_an_empty_one(
    run: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.ensure_child(TRASH).close()
    child = Folder.child

    def refuse(folder: Folder, name: str) -> Folder:
        if name == TRASH:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return child(folder, name)

    monkeypatch.setattr(Folder, "child", refuse)
    with pytest.raises(OSError, match=TRASH):
        scan_steps(run, RUN_ID)


@pytest.mark.parametrize("name", [LINEAGES, PINS])
@pytest.mark.parametrize("damage", [absolute_symlink, fifo, empty_file])
def test_thing_in_a_folders_place_is_an_error_and_not_an_empty_folder(
    run: Folder, name: str, damage: Damage
) -> None:
    path = Path(run.path, name)
    shutil.rmtree(path, ignore_errors=True)
    path.touch()
    damage(path)
    with pytest.raises(OSError, match=name):
        (
            scan_claims(run, RUN_ID),
            scan_trained(run, RUN_ID),
            scan_pins(run),
        )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (LINEAGES, {"run_id": "another"}),
        (PINS, {"attempt": OTHER}),
    ],
)
def test_document_under_another_name_or_of_another_run_is_not_believed(
    run: Folder, name: str, change: dict[str, Any]
) -> None:
    if name == LINEAGES:
        claim = LineageClaim(run_id="another", number=7, explicit=True, claimed_at=NOW)
        assert claim_lineage(run, claim)
        assert note_trained(run, Trained(run_id="another", number=7, trained_at=NOW))
        shutil.copy(Path(run.path, LINEAGES, "1.json"), Path(run.path, LINEAGES, "9.json"))
        words = Path(run.path, LINEAGES)
        shutil.copy(words / trained_file(1), words / trained_file(9))
        numbers = [claim.number for claim in scan_claims(run, RUN_ID)]
        assert numbers == [1, 2, 9]
        assert not scan_claims(run, RUN_ID)[2].explicit
        assert scan_trained(run, RUN_ID) == {1, 2}
    else:
        pins = Path(run.path, PINS)
        shutil.copy(pins / pin_file(ATTEMPT), pins / pin_file(change["attempt"]))
        assert scan_pins(run)[OTHER] is None


def seal_of(step: Folder, rank: int) -> Seal:
    return decode(Seal, step.read(seal_file(rank)) or b"", "")


@pytest.mark.parametrize(
    "change",
    [{"run_id": "another"}, {"attempt": OTHER}, {"rank": 0}],
    ids=["another run", "another attempt", "another rank"],
)
def test_seal_of_somebody_else_is_named(
    step: Folder, tmp_path: Path, change: dict[str, Any]
) -> None:
    foreign = replace(seal_of(step, 1), **change)
    for name in ("seal-1.json", "announced-1.json"):
        write_document(step, name, foreign)
    with Folder.open(tmp_path) as run:
        (record,) = scan_steps(run, RUN_ID)
    assert set(record.seals) == set(record.announced) == {0}
    assert [p.split("/")[-1] for p in record.problems] == [
        "announced-1.json: belongs to another rank, attempt or run",
        "seal-1.json: belongs to another rank, attempt or run",
    ]


@pytest.mark.parametrize("name", ["weights-0.distcp", "Weights-0.distcp", "METADATA-REMOTE"])
def test_file_that_two_ranks_claim_is_never_committed(step: Folder, name: str) -> None:
    for document in (COMMIT, MANIFEST, METADATA):
        step.remove(document)
    seal = seal_of(step, 1)
    shutil.copy(Path(step.path, "weights-1.distcp"), Path(step.path, "kept"))
    if step.size(name) is None:
        shutil.copy(Path(step.path, "weights-1.distcp"), Path(step.path, name))
    else:
        (Path(step.path, name)).write_bytes(Path(step.path, "weights-1.distcp").read_bytes())
    twin = file_entry(name, seal.files[0].content)
    write_document(step, seal_file(1), replace(seal, files=(*seal.files, twin)))
    with pytest.raises(Corrupt, match=rf"two ranks sealed the same file, (?i:{name})"):
        commit_step(step, ATTEMPT, RUN_ID, NOW)
    assert step.size(COMMIT) is None


def test_seals_of_a_million_ranks_that_are_not_there_cost_nothing(
    step: Folder, tmp_path: Path
) -> None:
    step.remove(COMMIT)
    write_document(step, seal_file(0), replace(seal_of(step, 0), world_size=1 << 20))
    with Folder.open(tmp_path) as run:
        (record,) = scan_steps(run, RUN_ID)
    assert not record.is_sealed_by_all
    assert commit_step(step, ATTEMPT, RUN_ID, NOW) is None


def test_million_strange_names_hide_no_step(
    run: Folder, a_step: Callable[..., Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_step().close()
    junk = [f"step-{number:020d}" for number in range(1_000_000)]
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda fd: junk + real(fd) if fd == run.fd else real(fd))
    assert [record.attempt for record in scan_steps(run, RUN_ID)] == [ATTEMPT]


def test_document_beyond_its_limit_is_not_read(run: Folder) -> None:
    with open(Path(run.path, "large.json"), "wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(Corrupt, match="over"):
        run.read("large.json")
    assert encode(read_identity(run)) == run.read(RUN_DOCUMENT)
