"""Runs, flushers and lone trainers for the rows of the bank. Test modules get all as fixtures."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_contract.digest import ContentHasher
from tidegate_contract.document import encode
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import (
    METADATA,
    METADATA_REMOTE,
    RUN_DOCUMENT,
    Attempt,
    Part,
    data_file,
    state_file,
    step_folder,
)
from tidegate_contract.publish import write_document, write_seal
from tidegate_contract.scan import StepRecord, scan_steps, verify_file
from tidegate_contract.seal import FileEntry, SaveReason, Scope, Seal, file_entry
from tidegate_contract.wire import Phase, Policy, RestoreNote, StepNote, TrainerState
from tidegate_sidecar.flush import Pass, flush_once
from tidegate_sidecar.health import Health
from tidegate_sidecar.loop import Beat, Loop
from tidegate_sidecar.settings import Settings
from tidegate_sidecar.tasks import CopyRanks, Places, RemoteTier
from tidegate_sidecar.transfer import Meter, TokenBucket

sys.path.insert(0, str(Path(__file__).parent))  # for `lone_trainer`

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NAME = "team/lm"
NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
SMALL_BLOCK = 1 << 12


COLLECTED = pytest.StashKey[frozenset[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remembers what was found before any of it is deselected."""
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> frozenset[str]:
    """Ids of all tests that this session found, the long ones included."""
    return request.config.stash[COLLECTED]


def attempt_of(step: int, nonce: int = 0) -> Attempt:
    return Attempt(step=step, nonce=f"{nonce or step:016x}")


def an_identity(run_id: str = RUN_ID, name: str = NAME) -> RunIdentity:
    return RunIdentity(run_id=run_id, name=name, uid=os.getuid(), created_at=NOW)


def an_entry(folder: Folder, name: str, data: bytes, scope: Scope = Scope.BOTH) -> FileEntry:
    """Writes a file as the trainer does and gives what its seal says of it."""
    hasher = ContentHasher(SMALL_BLOCK)
    hasher.update(data)
    with folder.new_file(name) as file:
        file.write(data)
        file.publish(len(data))
    return file_entry(name, hasher.finish(), scope)


def a_seal(rank: int, attempt: Attempt, files: tuple[FileEntry, ...], **changes: Any) -> Seal:
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "lineage": 1,
        "attempt": attempt,
        "tokens": attempt.step * 50,
        "rank": rank,
        "world_size": 2,
        "sealed_at": NOW,
        "reason": SaveReason.CADENCE,
        "torch_version": "2.15.0",
        "files": files,
    }
    return Seal(**(fields | changes))


def bytes_of(rank: int, attempt: Attempt, size: int) -> bytes:
    """Bytes that no other rank and no other attempt has."""
    pattern = bytes((rank * 31 + int(attempt.nonce, 16) * 7 + i) % 251 for i in range(1009))
    return (pattern * (size // len(pattern) + 1))[:size]


def a_sealed_step(
    run: Path, attempt: Attempt, ranks: tuple[int, ...] = (0, 1), *, size: int = 9000, **seal: Any
) -> None:
    """Writes and seals what trainers of these ranks leave in a local run folder."""
    with Folder.open(run) as folder, folder.ensure_child(step_folder(attempt)) as step:
        for rank in ranks:
            data = bytes_of(rank, attempt, size)
            files = [
                an_entry(step, data_file(Part.WEIGHTS, rank), data),
                an_entry(step, data_file(Part.REPLICA, rank), data[:50], Scope.LOCAL),
            ]
            if rank == min(ranks):
                files.append(an_entry(step, METADATA, b"with replicas", Scope.LOCAL))
            if rank == 0:
                files.append(an_entry(step, METADATA_REMOTE, b"plain metadata"))
            write_seal(step, a_seal(rank, attempt, tuple(files), **seal))


def records_of(run: Path, run_id: str = RUN_ID) -> list[StepRecord]:
    with Folder.open(run) as folder:
        return scan_steps(folder, run_id)


def assert_whole(run: Path, record: StepRecord) -> None:
    """The step counts, and each of its bytes is the one that was sealed."""
    assert record.committed is not None, record.problems
    with Folder.open(run / record.folder) as step:
        for entry in record.committed.manifest.files:
            verify_file(step, entry)


@dataclass(slots=True)
class Run:
    """A run with one remote folder and a local one per node; rank 0 is on the first."""

    remote: Path
    locals: list[Path]
    flushers: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def settings(self, node: int = 0, **changes: Any) -> Settings:
        fields: dict[str, Any] = {
            "run": NAME,
            "local": self.locals[node],
            "remote_root": self.remote,
            "remote": ".",
            "policy": Policy(),
        }
        return Settings(**(fields | changes))

    def flush_once(self, node: int = 0, **changes: Any) -> Pass:
        return flush_once(self.settings(node, **changes))

    def places(self, node: int = 0) -> Places:
        local, remote = str(self.locals[node]), str(self.remote)
        return Places(local=local, remote_root=remote, remote=".", identity=an_identity())

    def start(self, node: int = 0, policy: Policy | None = None) -> "subprocess.Popen[bytes]":
        """A flusher as a process of its own; it ends with the test."""
        environment = {
            keys.ENV_RUN: NAME,
            keys.ENV_LOCAL: str(self.locals[node]),
            keys.ENV_REMOTE: str(self.remote),
            keys.ENV_POLICY: encode(policy or Policy()).decode(),
            keys.ENV_METRICS_PORT: "0",
        }
        command = [sys.executable, "-m", "tidegate_sidecar", "flush"]
        process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)
        self.flushers.append(process)
        return process

    def records(self) -> dict[Attempt, StepRecord]:
        return {record.attempt: record for record in records_of(self.remote)}

    def durable(self) -> list[int]:
        return [r.attempt.step for r in records_of(self.remote) if r.committed]

    def outside(self) -> list[int]:
        """Steps on the remote tier that are not in `.trash`."""
        return [r.attempt.step for r in records_of(self.remote) if "/" not in r.folder]

    def write_state(self, node: int, *, lineage: int = 1, **changes: Any) -> None:
        """Rank `node`'s document, as its trainer writes it."""
        note = RestoreNote(reason="nothing to restore", lineage=lineage, seconds=0.1, at=NOW)
        fields: dict[str, Any] = {
            "run_id": RUN_ID,
            "rank": node,
            "world_size": 2,
            "pod_uid": "",
            "phase": Phase.TRAINING,
            "progress": StepNote(step=10, tokens=500, at=NOW),
            "restore": note,
            "written_at": NOW,
        }
        with Folder.open(self.locals[node]) as folder:
            write_document(folder, state_file(node), TrainerState(**(fields | changes)))


@pytest.fixture
def a_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes a run whose identity lies on both tiers."""
    runs: list[Run] = []

    def build(nodes: int = 1, root: Path = tmp_path) -> Run:
        run = Run(remote=root / "remote", locals=[root / f"node{n}" for n in range(nodes)])
        for path in [run.remote, *run.locals]:
            path.mkdir(parents=True)
            with Folder.open(path) as folder:
                write_document(folder, RUN_DOCUMENT, an_identity())
        for node in range(nodes):
            run.write_state(node)
        runs.append(run)
        return run

    yield build
    for process in [process for run in runs for process in run.flushers]:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture
def a_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Loop]]:
    """Makes loops over a node of a run, beaten by the test; they tidy up at each beat."""
    monkeypatch.setattr("tidegate_sidecar.loop._RETAIN_SECONDS", 0.0)
    open_loops: list[tuple[Loop, Folder]] = []

    def build(run: Run, node: int = 0, **changes: Any) -> Loop:
        folder = Folder.open(run.locals[node])
        loop = Loop(run.settings(node, **changes), folder, an_identity(), Health())
        open_loops.append((loop, folder))
        return loop

    yield build
    for loop, folder in open_loops:
        loop.close()
        folder.close()


def beat_until(loop: Loop, condition: Callable[[], Any], seconds: float = 15.0) -> None:
    """Beats until the condition holds; no beat may ever wait for the remote tier."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} s"
        began = time.monotonic()
        assert loop.beat() is Beat.ON
        assert time.monotonic() - began < 3.0
        loop.wait()


def wait_for(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """Polls until the condition is truthy; fails with its last value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {seconds} s: {value!r}"
        time.sleep(0.02)
    return value


def copy_here(places: Places, attempt: Attempt, ranks: Iterable[int] = (0, 1)) -> None:
    """What the flusher's child does with an attempt, in this process: announce, copy, commit."""
    tier, wanted = RemoteTier(places), frozenset(ranks)
    task = CopyRanks(attempt=attempt, ranks=wanted, bytes_per_second=None, files_at_once=1)
    tier.announce(attempt, wanted)
    tier.copy(task, Meter(TokenBucket(None), threading.Event(), lambda size: None))
    tier.commit(attempt, NOW)


def in_a_fork(action: Callable[[], object]) -> int:
    """Runs `action` in a process of its own, at once; gives its pid for `os.waitpid`."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:  # noqa: BLE001  # a fork must not return into pytest
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is visible: waiting for the disk would only make them slow."""
    for call in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, call, lambda fd: None)


@pytest.fixture
def a_strange_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Runs Python text, in which `os` is known, at the start of each process on the remote tier."""

    def build(text: str) -> None:
        folder = tmp_path / "strange"
        folder.mkdir()
        lines = ["import os, sys", "if 'tidegate_sidecar.child' in sys.orig_argv:"]
        lines += [f"    {line}" for line in text.strip().splitlines()]
        (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return build


@pytest.fixture
def a_trainer(tmp_path: Path) -> Callable[..., Any]:
    """Makes a trainer of one rank on a node's folder and, if `pfs` exists, the remote tier."""
    from lone_trainer import LoneTrainer  # needs torch, so only for those who ask for it

    def build(node: str = "node", root: Path = tmp_path, **given: Any) -> LoneTrainer:
        remote = root / "pfs"
        return LoneTrainer(root / node, remote if remote.exists() else None, **given)

    return build


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """What test modules cannot import from here."""
    return SimpleNamespace(
        attempt_of=attempt_of,
        an_identity=an_identity,
        an_entry=an_entry,
        a_seal=a_seal,
        a_sealed_step=a_sealed_step,
        records_of=records_of,
        assert_whole=assert_whole,
        beat_until=beat_until,
        wait_for=wait_for,
        copy_here=copy_here,
        in_a_fork=in_a_fork,
    )
