"""Area 2 of the bank, first half: what is removed, what is left alone, whose folder it is."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import (
    QUARANTINE,
    TRASH,
    seal_file,
    step_folder,
    temp_file,
)
from tidegate_contract.publish import commit_step, set_aside
from tidegate_contract.run_documents import read_document
from tidegate_contract.seal import FileEntry, Seal
from tidegate_contract.wire import Policy
from tidegate_sidecar.folders import RunFolder, ensure_run_folder
from tidegate_sidecar.removal import trash_step
from tidegate_sidecar.settings import parse_settings

Build = Callable[..., Any]
pytestmark = pytest.mark.long
OTHER = "11111111-0000-0000-0000-000000000000"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_c030_keep_one_of_a_run_never_counts_another_runs_steps(
    make: Any, a_run: Build, a_loop: Build
) -> None:
    run = a_run()
    foreign = make.attempt_of(1000)
    make.a_sealed_step(run.remote, foreign, run_id=OTHER)
    with Folder.open(run.remote / step_folder(foreign)) as folder:
        assert commit_step(folder, foreign, OTHER, make.an_identity().created_at)
    want = contents(run.remote / step_folder(foreign))
    loop = a_loop(run, policy=Policy(remote_keep=1, local_keep=1))
    for step in (10, 20, 30):
        make.a_sealed_step(run.locals[0], make.attempt_of(step))
        make.beat_until(loop, lambda step=step: step in run.durable())
    make.beat_until(loop, lambda: run.outside() == [30, 1000])
    assert run.durable() == [10, 20, 30]  # 10 and 20 wait in .trash
    assert contents(run.remote / step_folder(foreign)) == want


def test_c031_keep_three_holds_over_restarts_of_the_flusher(
    make: Any, a_run: Build, a_loop: Build
) -> None:
    run = a_run()
    saves = list(range(10, 110, 10))
    loop = a_loop(run, policy=Policy(remote_keep=3))
    for number, step in enumerate(saves, start=1):
        make.a_sealed_step(run.locals[0], make.attempt_of(step))
        make.beat_until(loop, lambda step=step: step in run.durable())
        assert set(saves[max(0, number - 3) : number]) <= set(run.outside())
        if number in (3, 5, 8):
            loop.close()
            loop = a_loop(run, policy=Policy(remote_keep=3))
    make.beat_until(loop, lambda: run.outside() == [80, 90, 100])


def an_unfinished_save(run: Path, attempt: Any) -> Path:
    """What a killed save, or one that is being written, looks like."""
    step = run / step_folder(attempt)
    step.mkdir(parents=True)
    (step / temp_file("weights-0.distcp", "0" * 16)).write_bytes(b"half")
    (step / "optim-0.distcp").write_bytes(b"whole")
    return step


def test_c032_only_abandoned_saves_of_this_run_are_swept(
    make: Any, a_run: Build, a_loop: Build, tmp_path: Path
) -> None:
    run = a_run()
    (local,) = run.locals
    abandoned = [an_unfinished_save(local, make.attempt_of(step)) for step in (210, 220, 230)]
    neighbour = an_unfinished_save(tmp_path / "another run", make.attempt_of(5))
    (local / "notes.txt").write_text("mine")
    (local / "step-backup").mkdir()
    make.a_sealed_step(local, make.attempt_of(300))
    live = an_unfinished_save(local, make.attempt_of(310))

    loop = a_loop(run)
    make.beat_until(loop, lambda: not any(step.exists() for step in abandoned))

    make.beat_until(loop, lambda: run.durable() == [300])
    assert {path.name for path in (live, neighbour)} <= {
        path.name for root in (local, neighbour.parent) for path in root.iterdir()
    }
    assert len(contents(live)) == len(contents(neighbour)) == 2
    assert (local / "notes.txt").read_text() == "mine"
    assert (local / "step-backup").is_dir()
    shutil.rmtree(live)
    make.a_sealed_step(local, make.attempt_of(310))
    make.beat_until(loop, lambda: 310 in run.durable())


def an_old_step_in_trash(make: Any, run: Any, attempt: Any) -> Path:
    """Durable, moved to `.trash` before its grace, and with many files."""
    make.a_sealed_step(run.locals[0], attempt)
    run.flush_once()
    with Folder.open(run.remote) as folder:
        assert trash_step(folder, attempt)
    step: Path = run.remote / TRASH / step_folder(attempt)
    for rank in range(100, 130):
        (step / f"weights-{rank}.distcp").write_bytes(b"")
    os.utime(step, (0, 0))
    return step


SLOW_UNLINK = """
import time
real = os.unlink
def unlink(path, **where):
    if path.startswith('weights-'):
        time.sleep(0.05)
    real(path, **where)
os.unlink = unlink
"""
FAILING_UNLINK = SLOW_UNLINK.replace("time.sleep(0.05)", "raise PermissionError(13, 'not yours')")


def test_c033_slow_removal_holds_no_save_and_no_copy_up(
    make: Any, a_run: Build, a_loop: Build, a_strange_file_system: Build
) -> None:
    run = a_run()
    trash = an_old_step_in_trash(make, run, make.attempt_of(10))
    make.a_sealed_step(run.locals[0], make.attempt_of(20))
    run.flush_once()
    a_strange_file_system(SLOW_UNLINK)
    loop = a_loop(run)
    make.beat_until(loop, lambda: len(list(trash.glob("weights-*"))) < 30)
    make.a_sealed_step(run.locals[0], make.attempt_of(30))
    far = run.remote / step_folder(make.attempt_of(30))
    make.beat_until(loop, lambda: not trash.exists())
    make.beat_until(loop, lambda: run.durable() == [20, 30])
    assert len(contents(far)) > 4


def test_c033_removal_that_fails_is_told_and_stops_no_flush(
    make: Any, a_run: Build, a_loop: Build, a_strange_file_system: Build
) -> None:
    run = a_run()
    an_old_step_in_trash(make, run, make.attempt_of(10))
    make.a_sealed_step(run.locals[0], make.attempt_of(20))
    run.flush_once()
    a_strange_file_system(FAILING_UNLINK)
    loop = a_loop(run)
    make.beat_until(loop, lambda: loop.troubles.worst)
    assert "not yours" in loop.troubles.worst.message
    make.a_sealed_step(run.locals[0], make.attempt_of(30))
    make.beat_until(loop, lambda: run.durable() == [20, 30])


HOSTILE = {
    "parents": "../../etc",
    "parent as name": "team/..",
    "encoded parents": "..%2f..%2fetc",
    "encoded dots": "team/%2e%2e",
    "absolute": "/etc",
    "NUL": "team/a\0b",
    "newline": "team/lm\n",
    "300 characters": "team/" + "a" * 300,
    "three parts": "team/../etc",
    "empty part": "team/",
    "capitals": "Team/LM",
    "backslash": "team\\..\\etc",
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_c035_name_that_leaves_its_place_is_refused_by_sidecar_and_agent(
    tmp_path: Path, name: str
) -> None:
    environment = {keys.ENV_RUN: name, keys.ENV_LOCAL: "/local", keys.ENV_REMOTE: "/remote/x"}
    with pytest.raises(Reject, match=r"run name .* allowed is NAMESPACE/NAME"):
        parse_settings(environment)
    with Folder.open(tmp_path) as root, pytest.raises(Reject):
        ensure_run_folder(root, RunFolder(run=name, uid=0, gid=0), "id")
    with pytest.raises(ValueError, match="not allowed"):
        FileEntry(name=f"{name}/x", size=0, block_size=1 << 12, blocks=(), digest="")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", [keys.ENV_LOCAL, keys.ENV_REMOTE])
@pytest.mark.parametrize("path", ["remote/x", "/remote/../etc", "/remote/x/../../etc", ".."])
def test_c035_path_with_parent_references_is_refused(variable: str, path: str) -> None:
    environment = {keys.ENV_RUN: "team/lm", keys.ENV_LOCAL: "/local", keys.ENV_REMOTE: "/remote/x"}
    with pytest.raises(Reject, match=variable):
        parse_settings(environment | {variable: path})


def plant(path: Path, kind: str, secret: Path) -> None:
    path.unlink(missing_ok=True)
    match kind:
        case "link":
            path.symlink_to(secret)
        case "fifo":
            os.mkfifo(path)
        case "device":
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
        case "folder":
            path.mkdir()


KINDS = ["link", "fifo", pytest.param("device", marks=as_root), "folder"]


@pytest.mark.parametrize("kind", KINDS)
def test_c036_thing_that_is_no_file_is_not_flushed(
    make: Any, a_run: Build, tmp_path: Path, kind: str
) -> None:
    run = a_run()
    secret = tmp_path / "secret"
    make.a_sealed_step(run.locals[0], make.attempt_of(10))
    step = run.locals[0] / step_folder(make.attempt_of(10))
    secret.write_bytes((step / "weights-1.distcp").read_bytes())  # its digest would match
    plant(step / "weights-1.distcp", kind, secret)
    plant(step / "unlisted", kind, secret)

    done = run.flush_once()

    assert done.lines == ("step 10: copied; not durable before ranks [1] are",)
    names = os.listdir(run.remote / step_folder(make.attempt_of(10)))
    assert not {"weights-1.distcp", "unlisted", seal_file(1)} & set(names)


@pytest.mark.parametrize("kind", KINDS)
def test_c036_thing_in_a_files_place_on_the_remote_tier_is_neither_read_nor_written_through(
    make: Any, a_run: Build, tmp_path: Path, kind: str
) -> None:
    run = a_run()
    victim = tmp_path / "victim"
    victim.write_bytes(b"not ours")
    make.a_sealed_step(run.locals[0], make.attempt_of(10))
    run.flush_once()
    step = run.remote / step_folder(make.attempt_of(10))
    plant(step / "weights-1.distcp", kind, victim)

    (record,) = make.records_of(run.remote)
    assert record.committed is None
    assert any("weights-1.distcp: not a regular file" in told for told in record.problems)
    if kind == "folder":  # it may be somebody's: it is not replaced, and the copy fails
        with pytest.raises(IsADirectoryError):
            make.copy_here(run.places(), make.attempt_of(10))
    else:
        make.copy_here(run.places(), make.attempt_of(10))
        make.assert_whole(run.remote, run.records()[make.attempt_of(10)])

    assert victim.read_bytes() == b"not ours"


@pytest.mark.parametrize("name", [TRASH, QUARANTINE, "step"])
def test_c036_folder_that_is_a_link_leads_nowhere(
    make: Any, a_run: Build, tmp_path: Path, name: str
) -> None:
    run = a_run()
    outside = tmp_path / "outside"
    outside.mkdir()
    attempt = make.attempt_of(10)
    make.a_sealed_step(run.locals[0], attempt)
    if name == "step":
        (run.remote / step_folder(attempt)).symlink_to(outside)
        with pytest.raises(NotADirectoryError):
            make.copy_here(run.places(), attempt)
    else:
        (run.locals[0] / name).symlink_to(outside)
        with Folder.open(run.locals[0]) as folder, pytest.raises(OSError):
            if name == TRASH:
                trash_step(folder, attempt)
            else:
                with folder.child(step_folder(attempt)) as step:
                    seal = read_document(step, Seal, seal_file(0))
                    set_aside(folder, step, attempt, seal.files[0])
        assert (run.locals[0] / step_folder(attempt) / "weights-0.distcp").exists()
    assert list(outside.iterdir()) == []
