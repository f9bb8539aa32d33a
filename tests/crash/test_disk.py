"""The simulated disk says what a real one says, and a power cut leaves what it may leave."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate_crash.calls import SimulatedFcntl, SimulatedOs
from tidegate_crash.cuts import apply_cut, enumerate_cuts
from tidegate_crash.disk import Disk
from tidegate_crash.process import Process, World

CREATE = os.O_WRONLY | os.O_CREAT
EXCLUSIVE = CREATE | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FLAGS = (
    os.O_RDONLY,
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK,
    os.O_RDWR,
    CREATE,
    EXCLUSIVE,
    FOLDER,
)

names = st.sampled_from(["a", "b", "c", "a/b", "b/c", "a/b/c", "."])
numbers = st.integers(0, 3)
operations = st.one_of(
    st.tuples(st.just("open"), numbers, names, st.sampled_from(FLAGS)),
    st.tuples(st.just("mkdir"), numbers, names, st.sampled_from([0o700, 0o2770])),
    st.tuples(st.sampled_from(["rmdir", "unlink", "stat", "utime"]), numbers, names),
    st.tuples(st.sampled_from(["rename", "link"]), numbers, names, numbers, names),
    st.tuples(st.sampled_from(["close", "dup", "fstat", "listdir", "lock", "unlock"]), numbers),
    st.tuples(st.just("fchmod"), numbers, st.sampled_from([0o2770, 0o640])),
    st.tuples(st.just("read"), numbers, st.integers(0, 9)),
    st.tuples(st.just("pread"), numbers, st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("write"), numbers, st.binary(max_size=5)),
)


class Twin:
    """One of two interpreters of the same operations."""

    def __init__(self, os_: Any, fcntl_: Any, root: str) -> None:
        self._os, self._fcntl = os_, fcntl_
        self._fds: list[int] = [os_.open(root, FOLDER)]

    def do(self, operation: tuple[Any, ...]) -> object:
        """What a process gets to see of an operation."""
        try:
            return getattr(self, f"_{operation[0]}")(*operation[1:])
        except OSError as error:
            return os.strerror(error.errno or 0)

    def tree(self) -> dict[str, object]:
        """Everything below the root."""
        return dict(self._walk(self._fds[0], ""))

    def _walk(self, fd: int, path: str) -> Iterator[tuple[str, object]]:
        for name in sorted(self._os.listdir(fd)):
            found = self._os.stat(name, dir_fd=fd, follow_symlinks=False)
            inside = self._os.open(name, os.O_RDONLY, dir_fd=fd)
            if stat.S_ISDIR(found.st_mode):
                yield f"{path}/{name}", self._told(found)
                yield from self._walk(inside, f"{path}/{name}")
            else:
                yield f"{path}/{name}", (self._told(found), self._os.read(inside, 99))
            self._os.close(inside)

    @staticmethod
    def _told(found: Any) -> tuple[str, int | None]:
        is_file = stat.S_ISREG(found.st_mode)
        return stat.filemode(found.st_mode), found.st_size if is_file else None

    def _at(self, number: int) -> int:
        return self._fds[number % len(self._fds)]

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds)

    def _open(self, at: int, path: str, flags: int) -> int:
        return self._keep(self._os.open(path, flags, 0o640, dir_fd=self._at(at)))

    def _close(self, number: int) -> None:
        if len(self._fds) > 1:
            self._os.close(self._fds.pop(1 + number % (len(self._fds) - 1)))

    def _dup(self, number: int) -> int:
        return self._keep(self._os.dup(self._at(number)))

    def _mkdir(self, at: int, path: str, mode: int) -> None:
        self._os.mkdir(path, mode, dir_fd=self._at(at))

    def _rmdir(self, at: int, path: str) -> None:
        self._os.rmdir(path, dir_fd=self._at(at))

    def _unlink(self, at: int, path: str) -> None:
        self._os.unlink(path, dir_fd=self._at(at))

    def _rename(self, at: int, source: str, into: int, target: str) -> None:
        self._os.rename(source, target, src_dir_fd=self._at(at), dst_dir_fd=self._at(into))

    def _link(self, at: int, source: str, into: int, target: str) -> None:
        where = {"src_dir_fd": self._at(at), "dst_dir_fd": self._at(into)}
        self._os.link(source, target, **where, follow_symlinks=False)

    def _stat(self, at: int, path: str) -> object:
        return self._told(self._os.stat(path, dir_fd=self._at(at), follow_symlinks=False))

    def _utime(self, at: int, path: str) -> None:
        self._os.utime(path, dir_fd=self._at(at), follow_symlinks=False)

    def _fstat(self, number: int) -> object:
        return self._told(self._os.fstat(self._at(number)))

    def _listdir(self, number: int) -> list[str]:
        return sorted(self._os.listdir(self._at(number)))

    def _fchmod(self, number: int, mode: int) -> None:
        self._os.fchmod(self._at(number), mode)

    def _read(self, number: int, size: int) -> bytes:
        data: bytes = self._os.read(self._at(number), size)
        return data

    def _pread(self, number: int, size: int, offset: int) -> bytes:
        data: bytes = self._os.pread(self._at(number), size, offset)
        return data

    def _write(self, number: int, data: bytes) -> int:
        count: int = self._os.write(self._at(number), data)
        return count

    def _lock(self, number: int) -> None:
        self._fcntl.flock(self._at(number), fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _sync(self, number: int) -> None:
        self._os.fsync(self._at(number))

    def _unlock(self, number: int) -> None:
        self._fcntl.flock(self._at(number), fcntl.LOCK_UN)

    def end(self) -> None:
        for fd in self._fds:
            self._os.close(fd)


def a_disk() -> tuple[Disk, World]:
    """An empty disk and the world of its one process, on machine m."""
    disk, world = Disk(["remote", "node0"]), World()
    world.process = Process("p", "m", 0, disk)
    return disk, world


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(operations, max_size=30))
def test_disk_of_any_calls_answers_as_a_real_one(calls: list[tuple[Any, ...]]) -> None:
    _, world = a_disk()
    before = os.umask(0)
    try:
        with tempfile.TemporaryDirectory() as root:
            os.chmod(root, 0o755)
            simulated = Twin(SimulatedOs(world), SimulatedFcntl(world), "/remote")
            real = Twin(os, fcntl, root)
            try:
                for call in calls:
                    assert (call, simulated.do(call)) == (call, real.do(call))
                assert simulated.tree() == real.tree()
            finally:
                real.end()
    finally:
        os.umask(before)


syncs = st.tuples(st.just("sync"), numbers)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(operations, syncs), max_size=25), st.data())
def test_cut_that_loses_nothing_changes_nothing(
    calls: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    disk, world = a_disk()
    twins = {}
    for number, machine in enumerate(("m", "other")):
        world.process = Process(machine, machine, number, disk)
        twins[machine] = world.process, Twin(SimulatedOs(world), SimulatedFcntl(world), "/remote")
    for call in calls:
        world.process, twin = twins[data.draw(st.sampled_from(sorted(twins)))]
        twin.do(call)
    for machines in (["m"], ["other"], ["m", "other"]):
        kept = [c for c in enumerate_cuts(disk, machines, 0, 0) if c.words == "nothing is lost"]
        for cut in kept:
            assert apply_cut(disk, cut).fingerprint() == disk.fingerprint()
