"""DCP's file layer on a real folder."""

import io
import os
import random
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidegate.storage import StepStorage
from tidegate.trust import open_trusted
from tidegate_contract.digest import ContentHasher
from tidegate_contract.errors import Corrupt, DamagedFile, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.scan import verify_file
from tidegate_contract.seal import Scope, file_entry


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


OWN = os.getuid()


@pytest.mark.parametrize(
    ("mode", "owner", "group", "want"),
    [
        (0o640, 0, 0, None),
        (0o660, 0, 0, None),
        (0o660, 0, 1, "mode 660 lets group .* chmod g-w"),
        (0o646, 0, 0, "mode 646 lets everybody .* chmod o-w"),
        (0o666, 0, 1, "mode 666 lets everybody"),
        (0o640, 1, 0, f"belongs to uid {OWN}, .*uids .{OWN + 1}.; .*Options.trusted_uids"),
    ],
    ids=["own", "own group", "tier's group", "everybody", "group and everybody", "a stranger's"],
)
def test_only_trusted_files_are_opened(folder, monkeypatch, mode, owner, group, want):
    """`owner`, `group`: how far the file's are from those of this process."""
    path = Path(folder.path, "f")
    path.write_bytes(b"x")
    path.chmod(mode)
    monkeypatch.setattr(os, "getgid", lambda: path.stat().st_gid + group)
    if want is None:
        os.close(open_trusted(folder, "f", {OWN + owner}))
        return
    with pytest.raises(Reject, match=f"/f: {want}"):
        open_trusted(folder, "f", {OWN + owner})


def test_own_file_that_the_sidecar_gave_the_tiers_group_is_opened(folder, monkeypatch):
    monkeypatch.setattr(os, "getgid", lambda: 4711)
    StepStorage(folder).write_file("f", b"x", Scope.BOTH)
    os.close(open_trusted(folder, "f", {OWN}))


def test_link_is_not_followed(folder, tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    with pytest.raises(Corrupt, match="symbolic link"):
        open_trusted(folder, "link", {os.getuid()})


BLOCK = 1 << 12


@pytest.fixture
def sealed(folder):
    """A file of nine blocks and a bit, and its entry."""
    data = random.Random(7).randbytes(9 * BLOCK + 100)
    (Path(folder.path) / "f").write_bytes(data)
    hasher = ContentHasher(BLOCK)
    hasher.update(data)
    return data, file_entry("f", hasher.finish())


@contextmanager
def opened(folder, entry):
    storage = StepStorage(folder, {OWN}, {entry.name: entry})
    with storage.create_stream(f"{folder.path}/{entry.name}", "rb") as stream:
        yield stream


def test_sealed_file_reads_as_any_file(folder, sealed):
    data, entry = sealed
    plain, drawn = io.BytesIO(data), random.Random(3)
    with opened(folder, entry) as stream:
        assert stream.readable()
        assert stream.seekable()
        for _ in range(300):
            place, size = drawn.randrange(len(data) + 50), drawn.choice([0, 1, 7, BLOCK, 5 * BLOCK])
            whence = drawn.choice([os.SEEK_SET, os.SEEK_END])
            place -= len(data) if whence == os.SEEK_END and place <= len(data) else 0
            assert stream.seek(place, whence) == plain.seek(place, whence)
            into, want = bytearray(size), bytearray(size)
            assert (stream.readinto(into), into) == (plain.readinto(want), want)
            assert stream.read(size) == plain.read(size)
            assert stream.tell() == plain.tell()
        stream.seek(3)
        assert stream.read() == data[3:]


def test_no_byte_of_a_block_is_handed_out_that_changed_after_it_was_verified(folder, sealed):
    data, entry = sealed
    verify_file(folder, entry)
    with opened(folder, entry) as stream:
        assert stream.read(10) == data[:10]
        with open(f"{folder.path}/f", "r+b") as file:
            file.seek(5 * BLOCK + 1)
            file.write(b"!")
        into = bytearray(4 * BLOCK)
        stream.seek(4 * BLOCK)
        with pytest.raises(DamagedFile, match="/f: block 5 of 10 is damaged") as caught:
            stream.readinto(into)
        assert into == data[4 * BLOCK : 5 * BLOCK] + bytes(3 * BLOCK)
        assert caught.value.entry == entry
        stream.seek(6 * BLOCK)
        assert stream.read() == data[6 * BLOCK :]


@pytest.mark.parametrize("by", [-1, 1, -BLOCK], ids=["shorter", "longer", "a block less"])
def test_file_of_another_size_than_sealed_is_damaged(folder, sealed, by):
    data, entry = sealed
    os.truncate(f"{folder.path}/f", len(data) + by)
    with (
        pytest.raises(DamagedFile, match=f"/f: {len(data) + by} bytes, declared {len(data)}"),
        opened(folder, entry),
    ):
        pass


def test_file_that_is_cut_while_it_is_read_is_damaged(folder, sealed):
    data, entry = sealed
    with opened(folder, entry) as stream:
        os.truncate(f"{folder.path}/f", 2 * BLOCK + 5)
        assert stream.read(2 * BLOCK) == data[: 2 * BLOCK]
        with pytest.raises(DamagedFile, match="/f: block 2 of 10 is damaged"):
            stream.read(1)


def test_reading_keeps_few_blocks_in_memory(folder):
    data = bytes(100 * BLOCK)
    (Path(folder.path) / "f").write_bytes(data)
    hasher = ContentHasher(BLOCK)
    hasher.update(data)
    into = bytearray(100)
    with opened(folder, file_entry("f", hasher.finish())) as stream:
        tracemalloc.start()
        while stream.readinto(into):
            pass
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 5 * BLOCK


def test_file_that_no_seal_declares_is_not_read(folder):
    storage = StepStorage(folder, {OWN}, {})
    with (
        pytest.raises(Corrupt, match="/f: no seal declares it"),
        storage.create_stream("any/f", "rb"),
    ):
        pass
