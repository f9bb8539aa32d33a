"""What a power cut may leave: of files, of names, and of what another machine did."""

import os
from collections.abc import Callable

import pytest

from tidegate_crash.calls import SimulatedOs
from tidegate_crash.cuts import apply_cut, enumerate_cuts
from tidegate_crash.disk import Disk
from tidegate_crash.nodes import File
from tidegate_crash.process import Process, World

EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
FOLDER = os.O_RDONLY | os.O_DIRECTORY


def a_disk() -> tuple[Disk, World]:
    """An empty disk and the world of its one process, on machine m."""
    disk, world = Disk(["remote", "node0"]), World()
    world.process = Process("p", "m", 0, disk)
    return disk, world


def a_file(fs: SimulatedOs, name: str, data: bytes, *, synced: bool) -> None:
    """A new file in `/remote`, whose name is not durable."""
    fd = fs.open(f"/remote/{name}", EXCLUSIVE)
    fs.write(fd, data)
    if synced:
        fs.fsync(fd)
    fs.close(fd)


def sync_names(fs: SimulatedOs, path: str = "/remote") -> None:
    fd = fs.open(path, FOLDER)
    fs.fsync(fd)
    fs.close(fd)


def files(disk: Disk) -> dict[str, bytes]:
    """name → bytes of all files in `/remote`."""
    nodes = ((path, disk.nodes[inode]) for path, inode in disk.walk())
    return {
        path.removeprefix("/remote/"): node.data for path, node in nodes if isinstance(node, File)
    }


def outcomes(disk: Disk, *machines: str) -> list[dict[str, bytes]]:
    """What a power cut of these machines may leave; at least what is there."""
    cuts = enumerate_cuts(disk, machines, mixes=20, seed=1)
    return [files(apply_cut(disk, cut)) for cut in cuts] or [files(disk)]


def write_unsynced(fs: SimulatedOs) -> None:
    a_file(fs, "new", b"abcd", synced=False)


def write_synced(fs: SimulatedOs) -> None:
    a_file(fs, "new", b"abcd", synced=True)


def sync_after_failure(fs: SimulatedOs) -> None:
    fd = fs.open("/remote/new", EXCLUSIVE)
    fs.write(fd, b"abcd")
    world_of(fs).is_failing = True
    with pytest.raises(OSError, match="Input/output error"):
        fs.fsync(fd)
    fs.fsync(fd)
    fs.close(fd)
    sync_names(fs)


def world_of(fs: SimulatedOs) -> Process:
    process: Process = fs._running()
    return process


def write_with_name(fs: SimulatedOs) -> None:
    a_file(fs, "new", b"abcd", synced=False)
    sync_names(fs)


def publish(fs: SimulatedOs) -> None:
    a_file(fs, "tmp", b"abcd", synced=True)
    fs.rename("/remote/tmp", "/remote/new")
    sync_names(fs)


def rename_unsynced_name(fs: SimulatedOs) -> None:
    a_file(fs, "tmp", b"abcd", synced=True)
    fs.rename("/remote/tmp", "/remote/new")


GONE: dict[str, bytes] = {}


@pytest.mark.parametrize(
    ("work", "want"),
    [
        pytest.param(
            write_unsynced,
            [GONE, {"new": b""}, {"new": b"ab"}, {"new": b"\0\0\0\0"}, {"new": b"abcd"}],
            id="nothing synced: gone, empty, torn, zeroed or whole",
        ),
        pytest.param(write_synced, [GONE, {"new": b"abcd"}], id="bytes synced: whole or gone"),
        pytest.param(
            write_with_name,
            [{"new": b""}, {"new": b"ab"}, {"new": b"\0\0\0\0"}, {"new": b"abcd"}],
            id="name synced: there, with any bytes",
        ),
        pytest.param(
            sync_after_failure,
            [{"new": b""}, {"new": b"ab"}, {"new": b"\0\0\0\0"}, {"new": b"abcd"}],
            id="an fsync failed: the next one helps nothing",
        ),
        pytest.param(publish, [{"new": b"abcd"}], id="published: nothing to lose"),
        pytest.param(
            rename_unsynced_name,
            [GONE, {"tmp": b"abcd"}, {"new": b"abcd"}],
            id="renamed: one name, even where the first was never durable",
        ),
    ],
)
def test_cut_leaves_what_was_not_synced_in_any_state(
    work: Callable[[SimulatedOs], None], want: list[dict[str, bytes]]
) -> None:
    disk, world = a_disk()
    work(SimulatedOs(world))
    found = outcomes(disk, "m")
    assert all(one in want for one in found)
    assert all(one in found for one in want)


def test_cut_during_replacement_leaves_the_old_or_the_new_file() -> None:
    disk, world = a_disk()
    fs = SimulatedOs(world)
    a_file(fs, "f", b"old", synced=True)
    sync_names(fs)
    a_file(fs, "tmp", b"new", synced=True)
    fs.rename("/remote/tmp", "/remote/f")
    assert {one["f"] for one in outcomes(disk, "m")} == {b"old", b"new"}


def test_cut_spares_what_another_machine_did() -> None:
    disk, world = a_disk()
    a_file(SimulatedOs(world), "ours", b"1", synced=False)
    world.process = Process("q", "other", 1, disk)
    a_file(SimulatedOs(world), "theirs", b"2", synced=False)
    assert all(one["theirs"] == b"2" for one in outcomes(disk, "m"))
    assert {"ours": b"1"} in outcomes(disk, "other")
    assert GONE in outcomes(disk, "m", "other")


def test_sync_of_a_folder_by_another_machine_keeps_names() -> None:
    disk, world = a_disk()
    a_file(SimulatedOs(world), "f", b"1", synced=True)
    world.process = Process("q", "other", 1, disk)
    sync_names(SimulatedOs(world))
    assert outcomes(disk, "m") == [{"f": b"1"}]


def test_sync_of_either_folder_keeps_a_move_between_them() -> None:
    for synced in ("/remote/a", "/remote/b"):
        disk, world = a_disk()
        fs = SimulatedOs(world)
        fs.mkdir("/remote/a")
        fs.mkdir("/remote/b")
        disk.sync_all()
        a_file(fs, "a/f", b"1", synced=True)
        fs.rename("/remote/a/f", "/remote/b/f")
        sync_names(fs, synced)
        assert outcomes(disk, "m") == [{"b/f": b"1"}]


def test_cut_that_loses_a_change_and_its_undoing_is_another_state() -> None:
    disk, world = a_disk()
    fs = SimulatedOs(world)
    a_file(fs, "f", b"", synced=True)
    fs.unlink("/remote/f")
    before = disk.state()
    cuts = list(enumerate_cuts(disk, ["m"], mixes=0, seed=0))
    assert cuts
    assert all(apply_cut(disk, cut).state() != before for cut in cuts)


def test_cut_between_two_moves_of_a_folder_leaves_it_once() -> None:
    disk, world = a_disk()
    fs = SimulatedOs(world)
    fs.mkdir("/remote/a")
    fs.mkdir("/remote/trash")
    disk.sync_all()
    fs.rename("/remote/a", "/remote/trash/a")
    fs.rename("/remote/trash/a", "/remote/b")
    for cut in enumerate_cuts(disk, ["m"], mixes=20, seed=1):
        paths = [path for path, _ in apply_cut(disk, cut).walk()]
        assert sum(path.rsplit("/")[-1] in ("a", "b") for path in paths) == 1, cut


def test_fingerprint_of_the_same_names_and_bytes_is_the_same() -> None:
    prints = set()
    for order in (("a", "b"), ("b", "a")):
        disk, world = a_disk()
        for name in order:
            a_file(SimulatedOs(world), name, name.encode(), synced=True)
        prints.add(disk.fingerprint())
    swapped, world = a_disk()
    a_file(SimulatedOs(world), "a", b"b", synced=True)
    a_file(SimulatedOs(world), "b", b"a", synced=True)
    assert len(prints) == 1
    assert swapped.fingerprint() not in prints


def test_clone_goes_its_own_way() -> None:
    disk, world = a_disk()
    a_file(SimulatedOs(world), "a", b"1", synced=True)
    before = disk.state(), disk.fingerprint()
    other = disk.clone()
    world.process = Process("q", "m", 1, other)
    a_file(SimulatedOs(world), "b", b"2", synced=True)
    assert (disk.state(), disk.fingerprint()) == before
    assert files(other) == {"a": b"1", "b": b"2"}
