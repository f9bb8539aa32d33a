"""Area 2 of the bank: copies that hang, meet, are made twice, or run under another user."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.layout import TRASH, is_temp_file, parse_temp_file, step_folder
from tidegate_contract.wire import Policy
from tidegate_sidecar.faults import SourceError

Build = Callable[..., Any]
pytestmark = pytest.mark.long
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


HANGING_WRITE = """
import signal
real = os.write
def write(fd, data):
    if '.distcp' in os.readlink(f'/proc/self/fd/{fd}'):
        signal.pause()
    return real(fd, data)
os.write = write
"""


def test_c042_hung_path_of_one_node_blocks_no_other_and_commits_nothing(
    make: Any, a_run: Build, a_strange_file_system: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(nodes=2)
    a_strange_file_system(HANGING_WRITE)
    hung = run.start(1, Policy(stall_timeout_seconds=1))
    monkeypatch.delenv("PYTHONPATH")
    for step in (10, 20, 30):
        for node in (0, 1):
            make.a_sealed_step(run.locals[node], make.attempt_of(step), (node,))
    make.wait_for(lambda: list(run.remote.glob("*/.tmp-*distcp")))

    done = run.flush_once(0)

    assert "step 30: copied; not durable before ranks [1] are" in done.lines
    assert run.durable() == []
    assert hung.poll() is None
    hung.send_signal(signal.SIGKILL)
    hung.wait()
    assert run.flush_once(1).lines[0] == "step 30: durable"
    make.assert_whole(run.remote, run.records()[make.attempt_of(30)])


def test_c044_final_flush_and_replacement_never_write_one_file_at_once(
    make: Any, a_run: Build
) -> None:
    run = a_run()
    policy = Policy(bandwidth_bytes_per_second=300_000)
    make.a_sealed_step(run.locals[0], make.attempt_of(10), size=400_000)
    step = run.remote / step_folder(make.attempt_of(10))
    first = run.start(policy=policy)
    make.wait_for(lambda: list(step.glob(".tmp-*distcp")))
    second = run.start(policy=policy)
    first.send_signal(signal.SIGTERM)
    seen: dict[str, object] = {}

    def is_durable() -> bool:
        names = os.listdir(step)
        under_way = [name for name in names if is_temp_file(name)]
        assert len({parse_temp_file(name) for name in under_way}) == len(under_way), names
        for name in set(names) - set(under_way):
            path = step / name  # who takes over may write the same document again, and no data
            what = path.stat().st_ino if path.suffix == ".distcp" else path.read_bytes()
            assert seen.setdefault(name, what) == what, f"{name} was written twice"
        return bool(run.durable() == [10])

    make.wait_for(is_durable)
    assert is_durable(), "COMMIT may have come after its look at the names"
    assert first.wait(10) == 0
    assert second.poll() is None
    make.assert_whole(run.remote, run.records()[make.attempt_of(10)])
    assert {"weights-0.distcp", "weights-1.distcp", "COMMIT"} <= set(seen)


@pytest.mark.parametrize("nonces", [(7, 8), (8, 7)], ids=["rising", "falling"])
def test_c045_commit_of_a_second_attempt_holds_nothing_of_the_first(
    make: Any, a_run: Build, a_loop: Build, nonces: tuple[int, int]
) -> None:
    run = a_run(nodes=2)
    first, second = (make.attempt_of(5, nonce) for nonce in nonces)
    make.a_sealed_step(run.locals[0], first, (0,))
    assert run.flush_once(0).lines == ("step 5: copied; not durable before ranks [1] are",)
    (run.locals[1] / step_folder(first)).mkdir()  # rank 1 was killed before its seal
    for node in (0, 1):
        run.write_state(node, lineage=2)
        make.a_sealed_step(run.locals[node], second, (node,), size=8000, lineage=2)
        run.flush_once(node)

    found = run.records()
    make.assert_whole(run.remote, found[second])
    assert found[first].committed is None
    assert {seal.attempt for seal in found[second].seals.values()} == {second}
    files = found[second].committed.manifest.files
    names = {path.name for path in (run.remote / step_folder(second)).iterdir()}
    assert {entry.name for entry in files} <= names
    assert {entry.size for entry in files if entry.name.endswith(".distcp")} == {8000}
    loop = a_loop(run)
    make.beat_until(loop, lambda: run.records()[first].folder.startswith(TRASH))
    assert run.outside() == [5]


TRAINER, ANOTHER, GROUP = 1000, 2000, 3000
CANNOT_READ = 7


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that other users reach; pytest's own is closed to them."""
    with tempfile.TemporaryDirectory(prefix="tidegate-cases-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def become(uid: int) -> None:
    os.setgroups([GROUP])
    os.setgid(uid)
    os.setuid(uid)


@as_root
@pytest.mark.parametrize(
    ("uid", "want"),
    [(TRAINER, 0), (ANOTHER, CANNOT_READ)],
    ids=["the trainer's user", "another user"],
)
def test_c046_private_umask_needs_the_trainers_user_and_nothing_is_chowned(
    make: Any,
    a_run: Build,
    open_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    want: int,
) -> None:
    run = a_run(root=open_folder)
    for path in [run.remote, *run.locals]:
        os.chown(path, TRAINER, GROUP)
        path.chmod(0o2770)
        os.chown(path / "run.json", TRAINER, GROUP)
    attempt = make.attempt_of(10)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an owner was changed")

    def save() -> None:
        become(TRAINER)
        os.umask(0o077)
        make.a_sealed_step(run.locals[0], attempt)

    def copy() -> None:
        become(uid)
        try:
            make.copy_here(run.places(), attempt)
        except SourceError as error:
            os._exit(CANNOT_READ if "cannot be read" in str(error) else 1)

    for call in ("chown", "fchown", "lchown"):
        monkeypatch.setattr(os, call, refuse)
    assert os.waitpid(make.in_a_fork(save), 0)[1] == 0
    status = os.waitpid(make.in_a_fork(copy), 0)[1]
    assert os.waitstatus_to_exitcode(status) == want
    assert run.durable() == ([10] if want == 0 else [])
