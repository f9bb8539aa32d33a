"""A damaged `run.json` is written anew from a sound copy, unless what lies beside it objects."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tidegate_contract.document import encode
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, RunIdentity
from tidegate_contract.layout import (
    LINEAGES,
    MANIFEST,
    QUARANTINE,
    RUN_DOCUMENT,
    TRASH,
    Attempt,
    parse_quarantined_file,
    step_folder,
)
from tidegate_contract.publish import (
    begin_identity,
    claim_lineage,
    commit_step,
    mend_identity,
    write_document,
)
from tidegate_contract.run_documents import read_identity

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
OTHER_ID = "0c0a5f0e-0000-4000-8000-000000000000"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SOUND = RunIdentity(run_id=RUN_ID, name="team/run", uid=0, created_at=NOW)
ATTEMPT = Attempt(step=100, nonce="00000000000000aa")
Build = Callable[..., Folder]


def flipped(bit: int = 400) -> bytes:
    data = bytearray(encode(SOUND))
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Folder]:
    """A run's folder whose `run.json` has a flipped bit."""
    (tmp_path / RUN_DOCUMENT).write_bytes(flipped())
    with Folder.open(tmp_path) as found:
        yield found


def kept(run: Folder) -> set[bytes]:
    return {path.read_bytes() for path in Path(run.path, QUARANTINE).iterdir()}


@pytest.mark.parametrize("damage", [flipped(), b"", encode(SOUND)[:50]], ids=["flip", "", "cut"])
def test_damaged_identity_is_written_anew_and_its_bytes_are_kept(
    run: Folder, a_step: Build, damage: bytes
) -> None:
    a_step().close()
    Path(run.path, RUN_DOCUMENT).write_bytes(damage)
    assert mend_identity(run, SOUND) == SOUND
    assert run.read(RUN_DOCUMENT) == encode(SOUND)
    assert kept(run) == {damage}
    with run.child(QUARANTINE) as quarantine:
        assert [parse_quarantined_file(name) for name in quarantine.names()] == [None]


def test_second_damage_is_kept_beside_the_first(run: Folder) -> None:
    mend_identity(run, SOUND)
    Path(run.path, RUN_DOCUMENT).write_bytes(flipped(401))
    mend_identity(run, SOUND)
    assert kept(run) == {flipped(), flipped(401)}


def test_two_that_mend_at_once_write_the_same_bytes(run: Folder) -> None:
    def mend() -> None:
        with Folder.open(run.path) as own:
            mend_identity(own, SOUND)

    threads = [threading.Thread(target=mend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.read(RUN_DOCUMENT) == encode(SOUND)
    assert kept(run) == {flipped()}
    assert sorted(run.names()) == [QUARANTINE, RUN_DOCUMENT]


def test_full_quarantine_does_not_keep_an_identity_from_being_mended(run: Folder) -> None:
    Path(run.path, QUARANTINE).write_text("mine")
    assert mend_identity(run, SOUND) == SOUND
    assert read_identity(run) == SOUND


def test_sound_identity_is_never_replaced(run: Folder) -> None:
    other = replace(SOUND, run_id=OTHER_ID)
    write_document(run, RUN_DOCUMENT, other)
    assert mend_identity(run, SOUND) == other
    assert read_identity(run) == other


@pytest.mark.parametrize("thing", ["folder", "link", "endless"])
def test_thing_that_is_no_damaged_document_stays(run: Folder, thing: str) -> None:
    path = Path(run.path, RUN_DOCUMENT)
    path.unlink()
    match thing:
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to("/etc/hostname")
        case _:
            path.touch()
            os.truncate(path, 1 << 40)
    before = os.lstat(path)
    with pytest.raises(Corrupt, match=RUN_DOCUMENT):
        mend_identity(run, SOUND)
    assert os.lstat(path).st_ino == before.st_ino


def of_another_run(run: Folder, a_step: Build) -> None:
    a_step(run_id=OTHER_ID).close()


def of_another_run_in_trash(run: Folder, a_step: Build) -> None:
    a_step(run_id=OTHER_ID).close()
    run.ensure_child(TRASH).close()
    name = step_folder(ATTEMPT)
    Path(run.path, name).rename(Path(run.path, TRASH, name))


def one_of_each(run: Folder, a_step: Build) -> None:
    a_step().close()
    a_step(run_id=OTHER_ID, attempt=Attempt(step=200, nonce="00000000000000bb")).close()


def without_a_word(run: Folder, a_step: Build) -> None:
    run.ensure_child(step_folder(ATTEMPT)).close()


def with_damaged_seals(run: Folder, a_step: Build) -> None:
    a_step().close()
    for seal in Path(run.path, step_folder(ATTEMPT)).glob("*.json"):
        seal.write_bytes(seal.read_bytes()[:99])


def claimed_by_another_run(run: Folder, a_step: Build) -> None:
    claim_lineage(run, LineageClaim(run_id=OTHER_ID, number=1, claimed_at=NOW))


@pytest.mark.parametrize(
    "prepare",
    [
        of_another_run,
        of_another_run_in_trash,
        one_of_each,
        without_a_word,
        with_damaged_seals,
        claimed_by_another_run,
    ],
    ids=lambda prepare: prepare.__name__,
)
def test_identity_that_what_lies_beside_it_does_not_confirm_stays_damaged(
    run: Folder, a_step: Build, prepare: Callable[[Folder, Build], None]
) -> None:
    prepare(run, a_step)
    with pytest.raises(Corrupt, match=r"run\.json: .*tidegate flush --once.*move the folder aside"):
        mend_identity(run, SOUND)
    assert run.read(RUN_DOCUMENT) == flipped()
    assert QUARANTINE not in run.names()


@pytest.mark.parametrize("witness", ["manifest", "seal", "announcement", "trash", "claim"])
def test_one_readable_word_of_the_run_confirms_its_identity(
    run: Folder, a_step: Build, witness: str
) -> None:
    with a_step() as step:
        assert commit_step(step, ATTEMPT, RUN_ID, NOW) is not None
    words = {"manifest": [MANIFEST], "seal": ["seal-1.json"], "announcement": ["announced-0.json"]}
    path = Path(run.path, step_folder(ATTEMPT))
    for file in path.glob("*.json"):
        if witness != "trash" and file.name not in words.get(witness, []):
            file.write_bytes(b"")
    if witness == "trash":
        run.ensure_child(TRASH).close()
        path.rename(Path(run.path, TRASH, path.name))
    if witness == "claim":
        claim_lineage(run, LineageClaim(run_id=RUN_ID, number=1, claimed_at=NOW))
        Path(run.path, LINEAGES, "2.json").write_bytes(b"")
    assert mend_identity(run, SOUND) == SOUND


def test_things_in_folders_places_confirm_nothing_and_stop_nothing(
    run: Folder, a_step: Build
) -> None:
    a_step().close()
    for name in (TRASH, LINEAGES, step_folder(Attempt(step=1, nonce="0" * 16))):
        Path(run.path, name).write_text("mine")
    assert mend_identity(run, SOUND) == SOUND


def test_run_is_not_begun_over_a_damaged_identity(run: Folder) -> None:
    with pytest.raises(Corrupt, match=r"tidegate flush --once.*move the folder aside"):
        begin_identity(run, replace(SOUND, run_id=OTHER_ID))
    assert run.read(RUN_DOCUMENT) == flipped()


def test_identity_of_a_newer_release_is_not_damaged(run: Folder) -> None:
    import hashlib

    body = encode(SOUND).replace(b'"version":1', b'"version":2')
    at = body.index(b',"sha256":"')
    bare = body[:at] + body[at + 76 :]
    digest = hashlib.sha256(bare.rstrip(b"\n")).hexdigest().encode()
    Path(run.path, RUN_DOCUMENT).write_bytes(body[: at + 11] + digest + body[at + 75 :])
    with pytest.raises(Reject, match="version 2"):
        mend_identity(run, SOUND)


def test_identity_that_another_run_wrote_meanwhile_is_not_mended_over(
    run: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(SOUND, run_id=OTHER_ID)
    fsync = os.fsync

    def begin_another(fd: int) -> None:
        monkeypatch.undo()
        write_document(run, RUN_DOCUMENT, other)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", begin_another)
    assert mend_identity(run, SOUND) == other
    assert read_identity(run) == other
