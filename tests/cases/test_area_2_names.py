"""Area 2 of the bank: names, renames and mounts: what a file system may do to them."""

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_contract.document import decode
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import CONTROL_DOCUMENT, TRASH, is_temp_file
from tidegate_contract.publish import claim_lineage, write_document
from tidegate_contract.wire import Control, Policy, SaveRequest
from tidegate_sidecar.removal import empty_step, trash_step

Build = Callable[..., Any]
pytestmark = pytest.mark.long
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
KILLED = 9
ODD = "we[i]rd *% \n ü?"


def test_c050_runs_of_one_name_in_two_namespaces_share_nothing(
    make: Any, a_trainer: Build, tmp_path: Path
) -> None:
    (tmp_path / "pfs").mkdir()
    for namespace, value in (("red", 1.0), ("blue", 2.0)):
        trainer = a_trainer(name=f"{namespace}/lm")
        trainer.save({"note": value}, make.attempt_of(10))
        assert trainer.flush().is_whole
    for namespace, want in (("red", 1.0), ("blue", 2.0)):
        state = {"note": 0.0}
        a_trainer(name=f"{namespace}/lm").restore(state)
        assert state["note"] == want
        a_trainer(name=f"{namespace}/lm", node="fresh").restore(state)
        assert state["note"] == want


def test_c050_second_run_on_the_path_of_another_is_refused(
    make: Any, a_trainer: Build, tmp_path: Path
) -> None:
    (tmp_path / "pfs").mkdir()
    first = a_trainer(name="red/lm")
    folder = first.save({"note": 1.0}, make.attempt_of(10))
    want = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    for local in (first.local, tmp_path / "elsewhere"):
        local.mkdir(exist_ok=True)
        paths = {keys.ENV_LOCAL: str(local), keys.ENV_REMOTE: str(first.remote)}
        with pytest.raises(Reject, match=r"run blue/lm: its folder holds run\.json of run red/lm"):
            a_trainer(environment=paths | {keys.ENV_RUN: "blue/lm"})
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == want


def place_of(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def test_c052_every_rename_of_a_flush_stays_in_its_folder(
    make: Any, a_run: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, renamed = os.rename, []

    def rename(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if place_of(src_dir_fd) != place_of(dst_dir_fd):
            raise OSError(18, "Invalid cross-device link")
        renamed.append(target)
        real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", rename)
    run = a_run()
    make.a_sealed_step(run.locals[0], make.attempt_of(10))
    make.copy_here(run.places(), make.attempt_of(10))
    make.assert_whole(run.remote, run.records()[make.attempt_of(10)])
    assert {"seal-1.json", "manifest.json", "COMMIT"} <= set(renamed)


@contextmanager
def mounted(*folders: Path) -> Iterator[None]:
    """A file system of its own on each folder."""
    done: list[Path] = []
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            command = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)]
            subprocess.run(command, check=True)
            done.append(folder)
        yield
    finally:
        for folder in reversed(done):
            subprocess.run(["umount", "-l", str(folder)], check=True)


@as_root
def test_c052_run_whose_folders_are_mounts_of_their_own_is_flushed_and_tidied(
    make: Any, a_trainer: Build, tmp_path: Path
) -> None:
    node, pfs = tmp_path / "node", tmp_path / "pfs"
    with mounted(node, pfs, pfs / "team", pfs / "team" / "lm"):
        assert len({path.stat().st_dev for path in (node, pfs, pfs / "team" / "lm")}) == 3
        trainer = a_trainer()
        for step in (10, 20):
            trainer.save({"note": float(step)}, make.attempt_of(step))
            assert trainer.flush().lines[0] == f"step {step}: durable"
        with Folder.open(trainer.remote) as folder:
            assert trash_step(folder, make.attempt_of(10))
            empty_step(folder, make.attempt_of(10))
        assert not list((trainer.remote / TRASH).iterdir())
        state = {"note": 0.0}
        assert a_trainer(node="fresh").restore(state).tier == "Remote"
        assert state["note"] == 20.0


class ObjectStore:
    """`os.rename` of a mount over an object store: each file is copied, then removed.

    The process ends, as by SIGKILL, at boundary `fatal` between two of these calls.
    """

    def __init__(self, fatal: int) -> None:
        self._left = fatal
        self._rename = os.rename

    def __call__(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        mode = os.stat(source, dir_fd=src_dir_fd, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode):
            self._move(source, target, src_dir_fd, dst_dir_fd)
            return
        self._boundary()
        os.mkdir(target, dir_fd=dst_dir_fd)
        flags = os.O_RDONLY | os.O_DIRECTORY
        near = os.open(source, flags, dir_fd=src_dir_fd)
        far = os.open(target, flags, dir_fd=dst_dir_fd)
        for name in sorted(os.listdir(near)):
            self._move(name, name, near, far)
        self._boundary()
        os.rmdir(source, dir_fd=src_dir_fd)

    def _move(self, source: str, target: str, near: int, far: int) -> None:
        self._boundary()
        fd = os.open(source, os.O_RDONLY, dir_fd=near)
        with os.fdopen(fd, "rb") as file:
            data = file.read()
        new = os.open("object", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640, dir_fd=far)
        with os.fdopen(new, "wb") as file:
            file.write(data)
        self._rename("object", target, src_dir_fd=far, dst_dir_fd=far)  # an object comes whole
        self._boundary()
        os.unlink(source, dir_fd=near)

    def _boundary(self) -> None:
        self._left -= 1
        if self._left == 0:
            os._exit(KILLED)


@pytest.mark.usefixtures("no_sync")
def test_c053_flush_killed_at_each_object_of_a_rename_never_shows_half_a_step(
    make: Any, a_run: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, fatal = KILLED, 0
    while code == KILLED:
        fatal += 1
        run = a_run(root=tmp_path / str(fatal))
        make.a_sealed_step(run.locals[0], make.attempt_of(10))

        def copy(fatal: int = fatal, run: Any = run) -> None:
            monkeypatch.setattr(os, "rename", ObjectStore(fatal))
            make.copy_here(run.places(), make.attempt_of(10))

        code = os.waitstatus_to_exitcode(os.waitpid(make.in_a_fork(copy), 0)[1])
        for record in run.records().values():
            if record.committed is not None:
                make.assert_whole(run.remote, record)
        make.copy_here(run.places(), make.attempt_of(10))
        make.assert_whole(run.remote, run.records()[make.attempt_of(10)])
    assert code == 0
    assert fatal > 20  # two boundaries for each of the files, documents and markers


@pytest.mark.usefixtures("no_sync")
def test_c053_removal_killed_at_each_object_of_a_rename_keeps_the_newest_and_is_finished(
    make: Any, a_run: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old, new = make.attempt_of(10), make.attempt_of(20)
    code, fatal = KILLED, 0
    while code == KILLED:
        fatal += 1
        run = a_run(root=tmp_path / str(fatal))
        for attempt in (old, new):
            make.a_sealed_step(run.locals[0], attempt)
            make.copy_here(run.places(), attempt)

        def tidy(fatal: int = fatal, run: Any = run) -> None:
            monkeypatch.setattr(os, "rename", ObjectStore(fatal))
            with Folder.open(run.remote) as folder:
                trash_step(folder, old)

        code = os.waitstatus_to_exitcode(os.waitpid(make.in_a_fork(tidy), 0)[1])
        with Folder.open(run.remote) as folder:
            for record in run.records().values():
                if record.committed is not None:
                    make.assert_whole(run.remote, record)
            make.assert_whole(run.remote, run.records()[new])
            for _ in range(2):  # the half in `.trash` first, then the half that was left outside
                trash_step(folder, old)
                empty_step(folder, old)
        assert run.outside() == run.durable() == [20]
        assert not list((run.remote / TRASH).iterdir())
    assert code == 0
    assert fatal > 10


UPDATES = 200
FAR = datetime(2030, 1, 1, tzinfo=UTC)


def update(run: Path, writer: int) -> None:
    """Writes one document again and again, in very different lengths, and claims numbers."""
    won = 0
    with Folder.open(run) as folder:
        for number in range(1, UPDATES + 1):
            policy = Policy() if (writer + number) % 2 else None
            request = SaveRequest(request_id=writer * 1000 + number, deadline=FAR)
            write_document(folder, CONTROL_DOCUMENT, Control(policy=policy, request=request))
            claim = LineageClaim(run_id=str(writer), number=number, claimed_at=FAR)
            won += claim_lineage(folder, claim)
    (run / f"won-{writer}").write_text(str(won))


@pytest.mark.usefixtures("no_sync")
def test_c056_document_that_two_processes_update_at_once_is_whole_at_every_moment(
    make: Any, a_run: Build
) -> None:
    (local,) = a_run().locals
    pids = [make.in_a_fork(lambda writer=writer: update(local, writer)) for writer in (1, 2)]
    seen: dict[int, list[int]] = {1: [0], 2: [0]}
    ended: list[int] = []
    with Folder.open(local) as folder:
        while len(ended) < 2:
            pid, status = os.waitpid(pids[len(ended)], os.WNOHANG)
            ended += [status] if pid else []
            data = folder.read(CONTROL_DOCUMENT)
            if data is not None:
                found = decode(Control, data, CONTROL_DOCUMENT).request
                assert found is not None
                writer, number = divmod(found.request_id, 1000)
                seen[writer].append(number)
    assert ended == [0, 0]
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert max(seen[1][-1], seen[2][-1]) == UPDATES
    assert not [name for name in os.listdir(local) if is_temp_file(name)]
    won = [int((local / f"won-{writer}").read_text()) for writer in (1, 2)]
    assert sum(won) == len(os.listdir(local / "lineages")) == UPDATES


def test_c057_folders_with_odd_names_are_saved_flushed_tidied_and_restored(
    make: Any, a_trainer: Build, a_run: Build, a_loop: Build, tmp_path: Path
) -> None:
    root = tmp_path / ODD
    (root / "pfs").mkdir(parents=True)
    trainer = a_trainer(root=root)
    trainer.save({"note": 7.0}, make.attempt_of(10))
    assert trainer.flush().is_whole
    for node in ("node", "fresh"):
        state = {"note": 0.0}
        a_trainer(root=root, node=node).restore(state)
        assert state["note"] == 7.0
    run = a_run(root=root / ODD)
    loop = a_loop(run, policy=Policy(remote_keep=1, local_keep=1))
    for step in (10, 20):
        make.a_sealed_step(run.locals[0], make.attempt_of(step))
        make.beat_until(loop, lambda step=step: step in run.durable())
    make.beat_until(loop, lambda: run.outside() == [20])
    make.beat_until(loop, lambda: len(list(run.locals[0].glob("step-*"))) == 1)


def odd_keys(value: float) -> dict[str, Any]:
    import torch

    names = ["a/b", "../../up", "..", ".", "", "line\nbreak", "ü 字 🙂", "k" * 300, "*[x]?%2f"]
    return {name: torch.full((3,), value + i) for i, name in enumerate(names)}


def test_c057_state_keys_are_names_of_nothing_on_disk(
    make: Any, a_trainer: Build, tmp_path: Path
) -> None:
    import torch

    (tmp_path / "pfs").mkdir()
    trainer = a_trainer()
    model = torch.nn.Module()
    for name in ("a/b", "line\nbreak", "ü 字", "k" * 300):
        model.register_parameter(name, torch.nn.Parameter(torch.full((2,), 5.0)))
    want = odd_keys(1.0)
    folder = trainer.save({"model": model, "ema": dict(want)}, make.attempt_of(10))
    assert trainer.flush().is_whole
    assert {path.suffix for path in folder.iterdir()} <= {".distcp", ".json", ""}
    for node in ("node", "fresh"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = {"model": model, "ema": odd_keys(0.0)}
        a_trainer(node=node).restore(state)
        assert all(torch.equal(state["ema"][name], want[name]) for name in want)
        assert {p.detach().sum().item() for p in model.parameters()} == {10.0}
    assert {path.name for path in tmp_path.iterdir()} == {"pfs", "node", "fresh"}
