"""Which run a folder holds, and when its identity may be made."""

import os
import shutil
from pathlib import Path

import pytest
from rank_files import LoneRank, alone_in

from tidegate.observe import observe_tiers
from tidegate.settings import Settings
from tidegate.site import open_site
from tidegate_contract import keys
from tidegate_contract.errors import Retry
from tidegate_contract.folder import Folder
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
