"""DCP's file layer on a real folder."""

import os

import pytest

from tidegate.storage import StepStorage, open_trusted
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.scan import verify_file
from tidegate_contract.seal import Scope


@pytest.fixture
def folder(tmp_path):
    with Folder.open(tmp_path) as opened:
        yield opened


def test_written_file_matches_its_entry(folder):
    storage = StepStorage(folder)
    with storage.create_stream("any/where/weights-0.distcp", "wb") as stream:
        stream.write(b"abc" * 1000)
        assert stream.tell() == 3000
        stream.flush()
        stream.close()
    (entry,) = storage.entries
    assert (entry.name, entry.size, entry.scope) == ("weights-0.distcp", 3000, Scope.BOTH)
    verify_file(folder, entry)


def test_write_that_fails_leaves_nothing(folder):
    storage = StepStorage(folder)
    with pytest.raises(OSError, match="disk"), storage.create_stream("x.distcp", "wb") as stream:
        stream.write(b"abc")
        raise OSError("disk")
    assert folder.names() == []
    assert storage.entries == []


@pytest.mark.parametrize(
    ("mode", "trusted", "error"),
    [
        (0o640, {os.getuid()}, None),
        (0o660, {os.getuid()}, None),
        (0o646, {os.getuid()}, Reject),
        (0o640, {os.getuid() + 1}, Reject),
    ],
    ids=["own", "group may write", "everybody may write", "a stranger's"],
)
def test_only_trusted_files_are_opened(folder, tmp_path, mode, trusted, error):
    path = tmp_path / "f"
    path.write_bytes(b"x")
    path.chmod(mode)
    if error is None:
        os.close(open_trusted(folder, "f", trusted))
        return
    with pytest.raises(error, match="/f: owner"):
        open_trusted(folder, "f", trusted)


def test_link_is_not_followed(folder, tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    with pytest.raises(Corrupt, match="symbolic link"):
        open_trusted(folder, "link", {os.getuid()})
