"""Damaged claims keep their numbers, and a kill leaves no empty document behind."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import pytest

from tidegate_contract.errors import Retry
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, RunIdentity
from tidegate_contract.layout import LINEAGES, RUN_DOCUMENT, is_temp_file, temp_file
from tidegate_contract.publish import claim_lineage, create_document, ensure_identity
from tidegate_contract.restore_point import next_lineage
from tidegate_contract.run_documents import read_identity, scan_claims

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
IDENTITY = RunIdentity(run_id=RUN_ID, name="team/bytelm", uid=0, created_at=NOW)
OTHER = RunIdentity(run_id="other", name="team/bytelm", uid=0, created_at=NOW)
RESERVED = temp_file(RUN_DOCUMENT, "0" * 16)


def a_claim(number: int) -> LineageClaim:
    return LineageClaim(run_id=RUN_ID, number=number, claimed_at=NOW)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def another_number(path: Path) -> None:
    path.write_bytes((path.parent / "1.json").read_bytes())


@pytest.mark.parametrize("damage", [empty, link, another_number])
def test_damaged_claim_is_skipped_but_keeps_its_number(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with Folder.open(tmp_path) as run:
        assert claim_lineage(run, a_claim(1))
        damage(tmp_path / LINEAGES / "4.json")
        claims = scan_claims(run, RUN_ID)
        assert [claim.number for claim in claims] == [1, 4]
        assert claims[0] == a_claim(1)
        assert (claims[1].restored, claims[1].explicit) == (None, False)
        assert next_lineage([], claims) == 5
        assert not claim_lineage(run, a_claim(4))
        assert claim_lineage(run, a_claim(5))


@pytest.fixture
def linkless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """A folder on a file system without hard links."""

    def no_links(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", no_links)
    with Folder.open(tmp_path) as folder:
        yield folder


def test_document_is_created_once_without_hard_links(linkless: Folder) -> None:
    assert create_document(linkless, RUN_DOCUMENT, IDENTITY)
    assert not create_document(linkless, RUN_DOCUMENT, OTHER)
    assert ensure_identity(linkless, OTHER) == IDENTITY
    assert linkless.names() == [RUN_DOCUMENT]


def test_creation_killed_without_hard_links_leaves_no_empty_document(linkless: Folder) -> None:
    pid = os.fork()
    if pid == 0:
        os.rename = lambda *_, **__: os._exit(9)
        create_document(linkless, RUN_DOCUMENT, IDENTITY)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert read_identity(linkless) is None
    with pytest.raises(Retry, match="about to write"):
        ensure_identity(linkless, IDENTITY)
    past = time.time() - 61
    os.utime(RESERVED, (past, past), dir_fd=linkless.fd)
    assert ensure_identity(linkless, IDENTITY) == IDENTITY
    assert read_identity(linkless) == IDENTITY
    assert RESERVED not in linkless.names()
    assert all(is_temp_file(name) for name in linkless.names() if name != RUN_DOCUMENT)


def reserve(folder: Folder, *, seconds_ago: float) -> None:
    """What a creator leaves that died, or was held up, before its rename."""
    made = time.time() - seconds_ago
    Path(folder.path, RESERVED).touch()
    os.utime(RESERVED, (made, made), dir_fd=folder.fd)


def test_abandoned_reservation_is_taken_over_by_one_of_two_creators(
    linkless: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(linkless, seconds_ago=61)
    whole, told = Folder.rename, []

    def rename(folder: Folder, source: str, target: str, *rest: Folder) -> None:
        if target == RUN_DOCUMENT and not told:
            told.append(None)
            told[0] = create_document(linkless, RUN_DOCUMENT, OTHER)
        whole(folder, source, target, *rest)

    monkeypatch.setattr(Folder, "rename", rename)

    assert create_document(linkless, RUN_DOCUMENT, IDENTITY)
    assert told == [False]
    assert read_identity(linkless) == IDENTITY
    assert linkless.names() == [RUN_DOCUMENT]


@pytest.mark.parametrize("is_published", [True, False], ids=["published", "still reserved"])
def test_creator_that_was_taken_for_dead_gives_up(
    linkless: Folder, monkeypatch: pytest.MonkeyPatch, is_published: bool
) -> None:
    """It is held up for over a minute between its reservation and its rename."""
    whole, told = Folder.size, []

    def size(folder: Folder, name: str) -> int | None:
        if name == RUN_DOCUMENT and not told and RESERVED in folder.names():
            told.append(None)
            if is_published:
                os.utime(RESERVED, (0, 0), dir_fd=folder.fd)
                told[0] = create_document(linkless, RUN_DOCUMENT, OTHER)
                Path(folder.path, RUN_DOCUMENT).rename(Path(folder.path, "later"))
            else:
                Path(folder.path, RESERVED).unlink()
            reserve(linkless, seconds_ago=0)  # of a third one
        return whole(folder, name)

    monkeypatch.setattr(Folder, "size", size)

    assert not create_document(linkless, RUN_DOCUMENT, IDENTITY)
    assert told == [is_published or None]
    assert read_identity(linkless) is None
    assert RESERVED in linkless.names(), "it is not this creator's to remove"


def test_fresh_reservation_that_took_an_abandoned_ones_place_is_not_used(
    linkless: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw the abandoned one; the other creator was quicker with taking it away."""
    reserve(linkless, seconds_ago=61)
    whole = Folder.rename

    def rename(folder: Folder, source: str, target: str, *rest: Folder) -> None:
        if source == RESERVED:
            reserve(linkless, seconds_ago=0)
        whole(folder, source, target, *rest)

    monkeypatch.setattr(Folder, "rename", rename)

    assert not create_document(linkless, RUN_DOCUMENT, IDENTITY)
    assert linkless.names() == []
