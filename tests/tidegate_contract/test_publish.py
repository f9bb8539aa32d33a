import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, RunIdentity
from tidegate_contract.layout import COMMIT, MANIFEST, METADATA, Attempt, step_folder
from tidegate_contract.publish import (
    check_owner,
    claim_lineage,
    commit_step,
    create_document,
    ensure_identity,
)
from tidegate_contract.run_documents import scan_claims
from tidegate_contract.scan import (
    CommittedStep,
    read_commit,
    scan_steps,
    verify_file,
)
from tidegate_contract.seal import Seal

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
ATTEMPT = Attempt(step=100, nonce="00000000000000aa")


def an_identity(**changes: Any) -> RunIdentity:
    fields: dict[str, Any] = {"run_id": RUN_ID, "name": "team-a/llama", "uid": 0, "created_at": NOW}
    return RunIdentity(**fields | changes)


def test_commit_of_a_whole_step_counts_and_verifies(a_step: Callable[..., Folder]) -> None:
    with a_step() as step:
        done = commit_step(step, ATTEMPT, RUN_ID, NOW)
        assert done is not None
        assert done.manifest.tokens == 5000
        for entry in done.manifest.files:
            verify_file(step, entry)
        assert METADATA in step.names()


def test_commit_twice_keeps_the_first(a_step: Callable[..., Folder]) -> None:
    with a_step() as step:
        first = commit_step(step, ATTEMPT, RUN_ID, NOW)
        assert commit_step(step, ATTEMPT, RUN_ID, NOW + timedelta(seconds=9)) == first


def test_commit_without_every_receipt_waits(a_step: Callable[..., Folder]) -> None:
    with a_step(ranks=(0,)) as step:
        assert commit_step(step, ATTEMPT, RUN_ID, NOW) is None
        assert COMMIT not in step.names()


def test_commit_with_a_receipt_whose_file_is_gone_waits(a_step: Callable[..., Folder]) -> None:
    with a_step() as step:
        step.remove("weights-1.distcp")
        assert commit_step(step, ATTEMPT, RUN_ID, NOW) is None


def test_commit_with_damaged_metadata_is_corrupt(a_step: Callable[..., Folder]) -> None:
    with a_step() as step:
        path = Path(step.path, "metadata-remote")
        path.write_bytes(path.read_bytes()[::-1])
        with pytest.raises(Corrupt, match="metadata-remote"):
            commit_step(step, ATTEMPT, RUN_ID, NOW)
        assert COMMIT not in step.names()


def test_commit_by_eight_committers_at_once_is_one(a_step: Callable[..., Folder]) -> None:
    step = a_step()

    def commit(_: int) -> CommittedStep | None:
        with Folder.open(step.path) as own:
            return commit_step(own, ATTEMPT, RUN_ID, NOW)

    with step, ThreadPoolExecutor(8) as pool:
        done = list(pool.map(commit, range(8)))
        assert done == [done[0]] * 8
        assert done[0] is not None
        assert read_commit(step, ATTEMPT, RUN_ID) == done[0]


@pytest.mark.parametrize("name", [MANIFEST, "weights-0.distcp", METADATA])
def test_commit_whose_file_was_cut_off_does_not_count(
    a_step: Callable[..., Folder], name: str
) -> None:
    with a_step() as step:
        commit_step(step, ATTEMPT, RUN_ID, NOW)
        os.truncate(Path(step.path, name), 5)
        with pytest.raises(Corrupt):
            read_commit(step, ATTEMPT, RUN_ID)


def test_scan_refuses_seals_of_another_run_or_attempt(
    a_step: Callable[..., Folder], tmp_path: Path
) -> None:
    a_step().close()
    with Folder.open(tmp_path) as run:
        assert scan_steps(run, RUN_ID)[0].is_sealed_by_all
        (record,) = scan_steps(run, "another-run")
        assert not record.seals
        assert "belongs to another" in record.problems[0]
        os.rename(
            tmp_path / step_folder(ATTEMPT),
            tmp_path / step_folder(Attempt(step=7, nonce="00000000000000aa")),
        )
        (record,) = scan_steps(run, RUN_ID)
        assert not record.seals


def test_scan_follows_no_link(a_step: Callable[..., Folder], tmp_path: Path) -> None:
    with a_step() as step:
        secret = tmp_path / "secret"
        secret.write_bytes(b"\1" * 10_000)
        step.remove("weights-0.distcp")
        os.symlink(secret, Path(step.path, "weights-0.distcp"))
        with Folder.open(tmp_path) as run:
            (record,) = scan_steps(run, RUN_ID)
        assert 0 not in record.seals
        assert "not a regular file" in record.problems[0]


def test_verify_names_the_damaged_block(
    a_step: Callable[..., Folder],
    a_seal: Callable[..., dict[str, Any]],
    write_rank: Callable[..., Seal],
) -> None:
    with a_step() as step:
        seal = write_rank(step, a_seal())
        path = Path(step.path, "weights-0.distcp")
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
        with pytest.raises(Corrupt, match="block 1 of 3 is damaged"):
            verify_file(step, seal.files[0])


def test_new_file_that_fails_to_sync_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    with Folder.open(tmp_path) as folder:
        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(OSError, match="I/O error"):
            create_document(folder, "run.json", an_identity())
        assert folder.names() == []


def test_identity_is_made_once(tmp_path: Path) -> None:
    with Folder.open(tmp_path) as run:
        first = ensure_identity(run, an_identity())
        assert ensure_identity(run, an_identity(run_id="later")) == first


def test_identity_of_a_file_system_without_hard_links_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refused)
    with Folder.open(tmp_path) as run:
        assert create_document(run, "run.json", an_identity())
        assert not create_document(run, "run.json", an_identity(run_id="later"))
        assert run.names() == ["run.json"]


@pytest.mark.parametrize(
    ("found", "wanted", "is_refused"),
    [(None, "a", False), ("a", None, False), ("a", "a", False), ("a", "b", True)],
    ids=["named by label", "label now", "same owner", "another owner"],
)
def test_owner_of_a_derived_name_must_match(
    found: str | None, wanted: str | None, is_refused: bool
) -> None:
    identity = an_identity(owner_uid=found)
    if is_refused:
        with pytest.raises(Reject, match="onNewOwner"):
            check_owner(identity, wanted)
    else:
        check_owner(identity, wanted)


def test_lineage_number_is_claimed_once(tmp_path: Path) -> None:
    claim = LineageClaim(run_id=RUN_ID, number=3, claimed_at=NOW)
    with Folder.open(tmp_path) as run:
        assert claim_lineage(run, claim)
        assert not claim_lineage(run, claim)
        assert scan_claims(run, RUN_ID) == [claim]
        assert scan_claims(run, "another") == []
