"""Which run a folder holds, and when its identity may be made."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rank_files import LoneRank, alone_in, give_away

from tidegate.observe import observe_tiers
from tidegate.settings import Settings
from tidegate.site import open_site
from tidegate_contract import keys
from tidegate_contract.errors import Retry
from tidegate_contract.folder import Folder
from tidegate_contract.publish import write_document
from tidegate_contract.run_documents import read_identity

MISSING = "run.json is missing: is the remote tier mounted"


def id_in(root: Path) -> str | None:
    with Folder.open(root / "tests" / "lm") as run:
        found = read_identity(run)
    return found.run_id if found else None


def begun(tmp_path: Path, **policy: object) -> Settings:
    """Settings of a run that was begun on a node and a remote tier."""
    (tmp_path / "pfs").mkdir()
    settings = alone_in(tmp_path, **policy)
    open_site(settings, LoneRank())
    return settings


def unmount(tmp_path: Path) -> None:
    """What is left of a mount point: an empty folder of the node's own disk."""
    (tmp_path / "pfs").rename(tmp_path / "away")
    (tmp_path / "pfs").mkdir()


def test_identity_of_a_first_start_is_on_both_tiers(tmp_path):
    begun(tmp_path)
    assert id_in(tmp_path / "node") == id_in(tmp_path / "pfs") is not None


def test_identity_of_a_known_run_is_not_made_again_on_an_empty_mount_point(tmp_path):
    settings = begun(tmp_path)
    unmount(tmp_path)

    with pytest.raises(Retry, match=MISSING):
        open_site(settings, LoneRank())

    assert list((tmp_path / "pfs").iterdir()) == []


def test_known_run_resumes_without_its_mount_where_the_policy_says_so(tmp_path):
    settings = begun(tmp_path, remote_unreachable_is_error=False)
    want = id_in(tmp_path / "node")
    unmount(tmp_path)

    site = open_site(settings, LoneRank())

    assert site.identity.run_id == want
    assert observe_tiers(site).remote is None
    assert list((tmp_path / "pfs").iterdir()) == []


def test_tier_that_is_unmounted_after_the_start_is_not_read_as_empty(tmp_path):
    settings = begun(tmp_path)
    site = open_site(settings, LoneRank())
    unmount(tmp_path)

    with pytest.raises(Retry, match=MISSING):
        observe_tiers(site)


def test_folder_of_another_run_id_is_not_read_as_this_run(tmp_path):
    settings = begun(tmp_path)
    site = open_site(settings, LoneRank())
    shutil.rmtree(tmp_path / "pfs" / "tests")
    open_site(alone_in(tmp_path, node="other"), LoneRank())

    with pytest.raises(Retry, match="holds another run"):
        observe_tiers(site)


@pytest.mark.parametrize("is_error", [True, False], ids=["error", "local only"])
def test_new_run_is_never_begun_while_its_remote_tier_is_gone(tmp_path, is_error):
    settings = alone_in(tmp_path, remote_unreachable_is_error=is_error)

    with pytest.raises(Retry, match="cannot be used"):
        open_site(settings, LoneRank())

    assert id_in(tmp_path / "node") is None


@pytest.mark.parametrize(
    ("value", "is_trusted"),
    [("4711", True), ("0", True), ("-1", False), ("root", False), ("", False), ("²", False)],
)
def test_files_of_the_sidecar_are_trusted_where_its_user_is_told(tmp_path, value, is_trusted):
    settings = alone_in(tmp_path, environment={keys.ENV_SIDECAR_UID: value})
    (tmp_path / "pfs").mkdir()

    trusted = open_site(settings, LoneRank()).trusted_uids

    assert trusted == {os.getuid(), 0} | ({int(value)} if is_trusted else set())


STRANGER = 6666


def document_in(root: Path) -> Path:
    return root / "tests" / "lm" / "run.json"


def name_user(root: Path, uid: int) -> None:
    """Rewrites a run's identity, so that it names this user."""
    with Folder.open(root / "tests" / "lm") as run:
        write_document(run, "run.json", replace(read_identity(run), uid=uid))


@pytest.mark.parametrize(
    ("owner", "is_believed"), [(STRANGER, False), (0, True), (4711, True), (os.getuid(), True)]
)
def test_user_that_the_identity_names_is_believed_by_its_owner(
    tmp_path, monkeypatch, owner, is_believed
):
    begun(tmp_path)
    name_user(tmp_path / "pfs", STRANGER)
    give_away(monkeypatch, owner, document_in(tmp_path / "pfs"))
    settings = alone_in(tmp_path, node="other", environment={keys.ENV_SIDECAR_UID: "4711"})

    site = open_site(settings, LoneRank())

    assert (STRANGER in site.trusted_uids) == is_believed
    assert site.doubted_uids == (set() if is_believed else {STRANGER})


@pytest.mark.parametrize("mode", [0o646, 0o660])
def test_identity_that_others_may_write_makes_nobody_trusted(tmp_path, monkeypatch, mode):
    begun(tmp_path)
    name_user(tmp_path / "pfs", STRANGER)
    document_in(tmp_path / "pfs").chmod(mode)
    monkeypatch.setattr(os, "getgid", lambda: document_in(tmp_path / "pfs").stat().st_gid + 1)

    assert STRANGER not in open_site(alone_in(tmp_path, node="other"), LoneRank()).trusted_uids


def test_identity_of_a_node_that_is_a_strangers_makes_nobody_trusted(tmp_path, monkeypatch):
    settings = begun(tmp_path)
    name_user(tmp_path / "pfs", STRANGER)
    give_away(monkeypatch, STRANGER, document_in(tmp_path / "node"))

    assert STRANGER not in open_site(settings, LoneRank()).trusted_uids


def test_word_of_a_stranger_is_not_copied_to_the_node(tmp_path, monkeypatch):
    begun(tmp_path)
    name_user(tmp_path / "pfs", STRANGER)
    give_away(monkeypatch, STRANGER, document_in(tmp_path / "pfs"))
    settings = alone_in(tmp_path, node="other", remote_unreachable_is_error=False)
    want = open_site(settings, LoneRank()).identity.run_id
    unmount(tmp_path)

    site = open_site(settings, LoneRank())

    assert site.identity.run_id == want
    assert STRANGER not in site.trusted_uids


def test_user_that_the_program_names_is_trusted_whoever_owns_the_identity(tmp_path, monkeypatch):
    begun(tmp_path)
    name_user(tmp_path / "pfs", STRANGER)
    give_away(monkeypatch, STRANGER, document_in(tmp_path / "pfs"))
    settings = alone_in(tmp_path, node="other", trusted_uids=(STRANGER, 77))

    site = open_site(settings, LoneRank())

    assert site.trusted_uids == {os.getuid(), 0, STRANGER, 77}
    assert not site.doubted_uids
    assert open_site(alone_in(tmp_path, node="other"), LoneRank()).doubted_uids == {STRANGER}
