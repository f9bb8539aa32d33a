"""Area 1 of the bank: what a save leaves, and what a later start makes of it."""

import logging
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tidegate_contract.errors import Corrupt
from tidegate_contract.folder import Folder
from tidegate_contract.layout import (
    METADATA_REMOTE,
    Part,
    data_file,
    is_temp_file,
    step_folder,
    temp_file,
)
from tidegate_contract.publish import announce, commit_step, write_seal
from tidegate_contract.restore_point import World, copy_of, decide_restore_point
from tidegate_contract.scan import committable_manifest, verify_file
from tidegate_contract.wire import Policy

Build = Callable[..., Any]
pytestmark = pytest.mark.long


def a_state(value: float) -> dict[str, Any]:
    return {"w": torch.full((40, 50), value), "m": torch.full((9000,), value), "note": value}


def values_of(state: dict[str, Any]) -> set[float]:
    """All different values: one if the state comes from one save alone."""
    return {state["note"], *state["w"].flatten().tolist(), *state["m"].flatten().tolist()}


def kill_at_byte(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """This process dies, by SIGKILL, in the middle of the write that would pass `budget`."""
    real, written = os.write, 0

    def write(fd: int, data: Any) -> int:
        nonlocal written
        left = budget - written
        if len(data) >= left:
            real(fd, data[:left])
            os.kill(os.getpid(), signal.SIGKILL)
        written += len(data)
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)


def bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@dataclass(frozen=True, slots=True)
class KilledSave:
    """Kills the saving process at a byte, and says whether it died of that."""

    trainer: Any
    make: Any
    monkeypatch: pytest.MonkeyPatch

    def __call__(self, state: dict[str, Any], attempt: Any, budget: int) -> bool:
        def save() -> None:
            torch.set_num_threads(1)  # the threads of the parent are not in a fork
            kill_at_byte(self.monkeypatch, budget)
            self.trainer.save(state, attempt)

        _, status = os.waitpid(self.make.in_a_fork(save), 0)
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.usefixtures("no_sync")
def test_c001_save_killed_at_any_byte_is_skipped_and_told(
    make: Any, a_trainer: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = a_trainer()
    trainer.save(a_state(1.0), make.attempt_of(100))
    size = bytes_under(trainer.save(a_state(2.0), make.attempt_of(200)))
    kill = KilledSave(trainer, make, monkeypatch)
    for number, budget in enumerate([1, size, *random.Random(1).sample(range(2, size), 8)]):
        attempt = make.attempt_of(300, 0xD00D + number)
        assert kill(a_state(3.0), attempt, budget)
        assert (trainer.local / step_folder(attempt)).exists()
        state = a_state(0.0)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            outcome = trainer.restore(state)
        assert outcome.candidate.attempt == make.attempt_of(200)
        assert values_of(state) == {2.0}
        assert {vars(r)["step"] for r in caplog.records if "not complete" in r.message} == {300}


def test_c001_leftover_of_a_killed_save_is_collected(
    make: Any, a_run: Build, a_loop: Build
) -> None:
    run = a_run()
    make.a_sealed_step(run.locals[0], make.attempt_of(200))
    leftover = run.locals[0] / step_folder(make.attempt_of(300))
    leftover.mkdir()
    (leftover / temp_file("weights-0.distcp", "0" * 16)).write_bytes(b"half")
    run.write_state(0, lineage=2)
    loop = a_loop(run)
    make.beat_until(loop, lambda: run.durable() == [200])
    assert leftover.exists()  # nothing of its lineage has gone on: it may still be written
    make.a_sealed_step(run.locals[0], make.attempt_of(301), lineage=2)
    make.beat_until(loop, lambda: not leftover.exists() and run.durable() == [200, 301])


def write_wide(make: Any, run: Path, attempt: Any, *, is_remote: bool) -> Path:
    """A step of 128 ranks in a run's folder, as on one of the two tiers."""
    with Folder.open(run) as folder, folder.ensure_child(step_folder(attempt)) as step:
        for rank in range(128):
            files = [make.an_entry(step, data_file(Part.WEIGHTS, rank), bytes([rank]) * 8192)]
            if rank == 0:
                files.append(make.an_entry(step, METADATA_REMOTE, b"plain"))
            seal = make.a_seal(rank, attempt, tuple(files), world_size=128)
            if is_remote:
                announce(step, seal)
            write_seal(step, seal)
        if is_remote:
            assert commit_step(step, attempt, seal.run_id, seal.sealed_at)
    return run / step_folder(attempt)


def spoil(step: Path) -> set[str]:
    """One shard is short, three are empty, one still has its temporary name."""
    os.truncate(step / "weights-7.distcp", 4096)
    for rank in (20, 63, 127):
        os.truncate(step / f"weights-{rank}.distcp", 0)
    (step / "weights-99.distcp").rename(step / temp_file("weights-99.distcp", "a" * 16))
    return {f"weights-{rank}.distcp" for rank in (7, 20, 63, 99, 127)}


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("is_remote", [False, True], ids=["on the node", "on the remote tier"])
def test_c002_step_with_bad_shards_is_incomplete_and_all_are_named(
    make: Any, a_run: Build, is_remote: bool
) -> None:
    run = a_run()
    root = run.remote if is_remote else run.locals[0]
    write_wide(make, root, make.attempt_of(100), is_remote=is_remote)
    want = spoil(write_wide(make, root, make.attempt_of(200), is_remote=is_remote))

    old, new = make.records_of(root)

    assert not old.problems
    assert len(new.seals) == 123
    assert new.committed is None
    named = {name for name in want if any(f"{name}:" in told for told in new.problems)}
    assert named == want
    assert not [told for told in new.problems if not any(f"{name}:" in told for name in want)]
    copies = tuple(copy for record in (old, new) if (copy := copy_of(record)) is not None)
    world = World(
        nodes=(frozenset(range(128)),),
        local=((),) if is_remote else (copies,),
        remote=copies if is_remote else (),
    )
    point = decide_restore_point(world)
    assert [candidate.attempt.step for candidate in point.candidates] == [100]
    assert [attempt.step for attempt, _ in point.refused] == [200]


@pytest.mark.usefixtures("no_sync")
def test_c002_shard_of_the_right_size_and_wrong_bytes_is_found_by_its_digest(
    make: Any, a_run: Build
) -> None:
    run = a_run()
    make.a_sealed_step(run.locals[0], make.attempt_of(200))
    path = run.locals[0] / step_folder(make.attempt_of(200)) / "weights-1.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    (record,) = make.records_of(run.locals[0])
    entry = next(e for e in record.seals[1].files if e.name == path.name)
    with (
        Folder.open(path.parent) as step,
        pytest.raises(Corrupt, match=r"weights-1\.distcp: block"),
    ):
        verify_file(step, entry)
    assert not run.flush_once().is_whole
    assert run.durable() == []


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.soak)])
def test_c004_ranks_of_two_nodes_that_write_one_folder_at_once_commit_each_step_once(
    make: Any, a_run: Build, steps: int
) -> None:
    run = a_run()
    attempts = [make.attempt_of(step) for step in range(1, steps + 1)]

    def work(rank: int) -> None:
        order = random.Random(rank).sample(attempts, steps)  # so that the ranks meet by chance
        with Folder.open(run.remote) as folder:
            for attempt in order:
                with folder.ensure_child(step_folder(attempt)) as step:
                    files = [
                        make.an_entry(step, data_file(Part.WEIGHTS, rank), bytes([rank]) * 5000)
                    ]
                    if rank == 0:
                        files.append(make.an_entry(step, METADATA_REMOTE, b"plain"))
                    seal = make.a_seal(rank, attempt, tuple(files), world_size=8)
                    announce(step, seal)
                    write_seal(step, seal)
                    commit_step(step, attempt, seal.run_id, seal.sealed_at)

    pids = [make.in_a_fork(lambda rank=rank: work(rank)) for rank in range(8)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 8
    records = run.records()
    assert sorted(records) == attempts
    for record in records.values():
        make.assert_whole(run.remote, record)
        names = os.listdir(run.remote / record.folder)
        assert len(names) == 8 * 3 + 4  # data, announcement, receipt; metadata twice, two markers
        assert not [name for name in names if is_temp_file(name)]


@pytest.mark.usefixtures("no_sync")
def test_c005_second_save_of_one_step_stands_beside_the_first(
    make: Any, a_trainer: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pfs").mkdir()
    trainer = a_trainer()
    size = bytes_under(trainer.save(a_state(1.0), make.attempt_of(50, 7)))
    assert trainer.flush().is_whole
    trainer.save(a_state(2.0), make.attempt_of(50, 8))
    assert trainer.flush().is_whole
    kill = KilledSave(trainer, make, monkeypatch)
    assert kill(a_state(3.0), make.attempt_of(50, 9), size // 2)

    state = a_state(0.0)
    assert trainer.restore(state).candidate.attempt.step == 50
    assert values_of(state) == {2.0}
    for record in make.records_of(trainer.remote, trainer.run_id):
        make.assert_whole(trainer.remote, record)


def test_c022_what_is_told_as_durable_is_never_under_way(
    make: Any, a_run: Build, a_loop: Build
) -> None:
    run = a_run()
    loop = a_loop(run, policy=Policy(bandwidth_bytes_per_second=30_000, remote_keep=20))
    told: list[int] = []
    beats = iter(range(10_000))

    def look() -> bool:
        if loop.remote is not None and loop.remote.newest is not None:
            newest = loop.remote.newest.attempt
            if newest.step not in told:
                make.assert_whole(run.remote, run.records()[newest])
                told.append(newest.step)
        number = next(beats)
        if len(told) < 2 and number % 3 == 0:  # a copy takes 2 s, saves come every 1.5 s
            make.a_sealed_step(run.locals[0], make.attempt_of(10 + number), size=30_000)
        return len(told) >= 2 and number > 9

    make.beat_until(loop, look)
    assert told == sorted(told)
    assert set(told) <= set(run.durable())


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("latest", ["missing", "dangling link", "file with an old name"])
def test_c027_pointer_of_any_kind_decides_nothing(make: Any, a_trainer: Build, latest: str) -> None:
    trainer = a_trainer()
    for step in (100, 200):
        trainer.save(a_state(float(step)), make.attempt_of(step))
    pointer = trainer.local / "latest"
    if latest == "dangling link":
        pointer.symlink_to(step_folder(make.attempt_of(300)))
    elif latest == "file with an old name":
        pointer.write_text(step_folder(make.attempt_of(100)))
    state = a_state(0.0)

    assert trainer.restore(state).candidate.attempt.step == 200

    assert values_of(state) == {200.0}


@pytest.mark.usefixtures("no_sync")
def test_c028_tree_is_restored_where_it_is_mounted_and_holds_no_link_or_path(
    make: Any, a_trainer: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(95, "links are not supported here")

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(os, "link", refuse)
    old, new = tmp_path / "mount-a", tmp_path / "mount-b"
    (old / "pfs").mkdir(parents=True)
    trainer = a_trainer(root=old)
    trainer.save(a_state(4.0), make.attempt_of(40))
    assert trainer.flush().is_whole
    entries = [Path(at) / name for at, folders, names in os.walk(old) for name in folders + names]
    assert not [path for path in entries if path.is_symlink()]
    named = [path for path in entries if path.is_file() and b"mount-a" in path.read_bytes()]
    assert not named
    old.rename(new)

    for node in ("node", "fresh"):
        state = a_state(0.0)
        a_trainer(root=new, node=node).restore(state)
        assert values_of(state) == {4.0}


def test_c005_commit_of_a_committed_step_changes_nothing(make: Any, a_run: Build) -> None:
    run = a_run()
    make.a_sealed_step(run.locals[0], make.attempt_of(50))
    run.flush_once()
    path = run.remote / step_folder(make.attempt_of(50))
    before = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
    identity = make.an_identity()
    with Folder.open(path) as step:
        assert committable_manifest(step, make.attempt_of(50), identity.run_id) is not None
        found = commit_step(step, make.attempt_of(50), identity.run_id, identity.created_at)
    assert found is not None
    assert {entry.name: entry.stat().st_ino for entry in path.iterdir()} == before
