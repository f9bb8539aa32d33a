import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.document import decode
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import TierState
from tidegate_contract.layout import ROOT_ID, TIER_DOCUMENT
from tidegate_sidecar.folders import (
    RunFolder,
    ensure_root_id,
    ensure_run_folder,
    write_tier_state,
)
from tidegate_sidecar.mounts import TierReason

Build = Callable[..., Any]
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
UID, GID = os.geteuid(), os.getegid()
needs_root = pytest.mark.skipif(UID != 0, reason="gives folders away")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def root(tmp_path: Path) -> Any:
    """An open tier root."""
    path = tmp_path / "nvme"
    path.mkdir()
    with Folder.open(path) as folder:
        yield folder


def test_c047_run_folder_belongs_to_the_trainer_and_the_tiers_group(root: Folder) -> None:
    owner = (1000, 64738) if UID == 0 else (UID, GID)
    old = os.umask(0o077)
    try:
        ensure_run_folder(root, RunFolder(run="team/bytelm", uid=owner[0], gid=owner[1]), "abc")
    finally:
        os.umask(old)
    path = Path(root.path) / "team" / "bytelm"
    assert mode_of(path) == 0o2770
    assert (path.stat().st_uid, path.stat().st_gid) == owner
    assert mode_of(path.parent) == 0o755
    assert path.parent.stat().st_uid == UID
    assert (path / ROOT_ID).read_text() == "abc\n"


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="drops a capability by setpriv")
def test_run_folder_keeps_its_group_bit_without_the_right_to_set_it(root: Folder) -> None:
    program = (
        "import sys\nfrom tidegate_contract.folder import Folder\n"
        "from tidegate_sidecar.folders import RunFolder, ensure_run_folder\n"
        "wanted = RunFolder(run='team/bytelm', uid=1000, gid=64738)\n"
        "for _ in range(2): ensure_run_folder(Folder.open(sys.argv[1]), wanted, 'abc')\n"
    )
    weaker = ["setpriv", "--bounding-set", "-fsetid", "--inh-caps", "-fsetid"]
    path = Path(root.path) / "team" / "bytelm"
    subprocess.run([*weaker, sys.executable, "-c", program, root.path], check=True)
    assert mode_of(path) == 0o2770
    path.chmod(0o700)
    subprocess.run([*weaker, sys.executable, "-c", program, root.path], check=True)
    assert mode_of(path) == 0o2770


def test_run_folder_made_again_keeps_what_is_in_it(root: Folder) -> None:
    wanted = RunFolder(run="team/bytelm", uid=UID, gid=GID)
    ensure_run_folder(root, wanted, "abc")
    path = Path(root.path) / "team" / "bytelm"
    (path / "kept").write_text("x")
    path.chmod(0o700)
    ensure_run_folder(root, wanted, "another")
    assert (path / "kept").exists()
    assert mode_of(path) == 0o2770
    assert (path / ROOT_ID).read_text() == "abc\n"


@pytest.mark.parametrize("where", ["team", "team/bytelm"], ids=["namespace", "run"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_run_folder_behind_a_link_is_refused(
    root: Folder, tmp_path: Path, where: str, kind: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    path = Path(root.path) / where
    path.parent.mkdir(exist_ok=True)
    if kind == "file":
        path.write_text("x")
    else:
        path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(Corrupt, match="not a folder"):
        ensure_run_folder(root, RunFolder(run="team/bytelm", uid=UID, gid=GID), "abc")
    assert list(outside.iterdir()) == []
    assert mode_of(outside) == 0o700
    assert not (tmp_path / "nowhere").exists()


@needs_root
def test_namespace_folder_of_a_stranger_is_refused(root: Folder) -> None:
    path = Path(root.path) / "team"
    path.mkdir()
    os.chown(path, 1000, 1000)
    with pytest.raises(Corrupt, match="belongs to someone else"):
        ensure_run_folder(root, RunFolder(run="team/bytelm", uid=1000, gid=GID), "abc")


@pytest.mark.parametrize("run", ["../etc", "team/..", "team/a/b", "team", "team/A", "team/x\0"])
def test_run_name_that_leaves_the_tier_is_refused(root: Folder, run: str) -> None:
    with pytest.raises(Reject):
        ensure_run_folder(root, RunFolder(run=run, uid=UID, gid=GID), "abc")


def test_root_id_is_made_once(root: Folder) -> None:
    first = ensure_root_id(root)
    assert len(first) == 32
    assert ensure_root_id(root) == first


def test_tier_document_is_written_when_it_says_something_new(root: Folder) -> None:
    path = Path(root.path) / TIER_DOCUMENT
    write_tier_state(root, "abc", TierReason.ON_ROOT_DISK, NOW)
    state = decode(TierState, path.read_bytes(), TIER_DOCUMENT)
    assert (state.root_id, state.usable, state.reason) == ("abc", False, "OnRootDisk")
    before = path.stat().st_ino
    write_tier_state(root, "abc", TierReason.ON_ROOT_DISK, NOW)
    assert path.stat().st_ino == before
    assert write_tier_state(root, "abc", TierReason.OK, NOW).usable
