"""Builders: views for the pure parts, sealed steps and runs in real folders for the rest."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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
from tidegate_contract.scan import StepRecord, scan_steps
from tidegate_contract.seal import SaveReason, Scope, Seal, file_entry
from tidegate_contract.wire import Phase, Policy, RestoreNote, StepNote, TrainerState
from tidegate_sidecar.flush import Pass, flush_once
from tidegate_sidecar.health import Health
from tidegate_sidecar.loop import Beat, Loop
from tidegate_sidecar.settings import Settings
from tidegate_sidecar.tasks import Places, RemoteTier
from tidegate_sidecar.view import CommitView, RemoteView, StepView

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
RUN = "team/bytelm"
NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
SMALL_BLOCK = 1 << 12
IDENTITY = RunIdentity(run_id=RUN_ID, name=RUN, uid=1000, created_at=NOW)


def attempt_of(step: int, nonce: int = 0) -> Attempt:
    return Attempt(step=step, nonce=f"{nonce or step:016x}")


def a_view(step: int, **changes: Any) -> StepView:
    """A step of two ranks, both here."""
    attempt = changes.pop("attempt", attempt_of(step))
    fields: dict[str, Any] = {
        "attempt": attempt,
        "folder": step_folder(attempt),
        "lineage": 1,
        "tokens": step * 50,
        "world_size": 2,
        "sealed_at": NOW + timedelta(minutes=step),
        "reason": SaveReason.CADENCE,
        "sealed": {0: 100, 1: 100},
    }
    return StepView(**(fields | changes))


def a_commit(step: int, **changes: Any) -> StepView:
    """A committed step on the remote tier."""
    commit = CommitView(committed_at=NOW, manifest_sha256="0" * 64, size_bytes=200)
    return a_view(step, **({"announced": frozenset({0, 1}), "commit": commit} | changes))


def a_remote(*steps: StepView, **changes: Any) -> RemoteView:
    """The remote tier with these steps; the newest commit outside `.trash` is confirmed."""
    view = RemoteView(steps=tuple(sorted(steps, key=lambda step: step.attempt)), **changes)
    commits = [step for step in steps if step.commit and not step.is_in_trash]
    newest = max(commits, key=lambda step: view.key(step) or (0, 0, ""), default=None)
    return replace(view, newest=newest)


def a_state(rank: int = 0, **changes: Any) -> TrainerState:
    """A trainer's document."""
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "rank": rank,
        "world_size": 2,
        "pod_uid": "",
        "phase": Phase.TRAINING,
        "progress": StepNote(step=10, tokens=500, at=NOW),
        "restore": RestoreNote(reason="nothing to restore", lineage=1, seconds=0.1, at=NOW),
        "written_at": NOW,
    }
    return TrainerState(**(fields | changes))


def a_sealed_step(
    run: Path, step: int, ranks: tuple[int, ...] = (0, 1), *, size: int = 10_000, **changes: Any
) -> Attempt:
    """Writes what trainers of these ranks leave in a local run folder, and seals it."""
    attempt: Attempt = changes.pop("attempt", attempt_of(step))
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "lineage": 1,
        "attempt": attempt,
        "tokens": step * 50,
        "world_size": 2,
        "sealed_at": NOW,
        "reason": SaveReason.CADENCE,
        "torch_version": "2.15.0",
    } | changes
    with Folder.open(run) as folder, folder.ensure_child(step_folder(attempt)) as target:
        for rank in ranks:
            entries = [
                _write(target, name, data, scope)
                for name, data, scope in _files(rank, min(ranks), step, size)
            ]
            write_seal(target, Seal(**fields, rank=rank, files=tuple(entries)))
    return attempt


def _files(rank: int, first: int, step: int, size: int) -> Iterator[tuple[str, bytes, Scope]]:
    pattern = bytes((rank * 31 + step + i) % 251 for i in range(1009))
    data = (pattern * (size // len(pattern) + 1))[:size]
    yield data_file(Part.WEIGHTS, rank), data, Scope.BOTH
    yield data_file(Part.OPTIM, rank), data[::-1], Scope.BOTH
    yield data_file(Part.REPLICA, rank), data[:100], Scope.LOCAL
    if rank == first:
        yield METADATA, b"metadata with replicas", Scope.LOCAL
    if rank == 0:
        yield METADATA_REMOTE, b"plain metadata", Scope.BOTH


def _write(folder: Folder, name: str, data: bytes, scope: Scope) -> Any:
    hasher = ContentHasher(SMALL_BLOCK)
    hasher.update(data)
    with folder.new_file(name) as file:
        file.write(data)
        file.publish(len(data))
    return file_entry(name, hasher.finish(), scope)


@dataclass(slots=True)
class Run:
    """A run with one remote folder and a local one per node.

    Attributes:
        remote: the run's folder on the remote tier.
        locals: of each node.
    """

    remote: Path
    locals: list[Path] = field(default_factory=list)
    flushers: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def settings(self, node: int = 0, **changes: Any) -> Settings:
        fields: dict[str, Any] = {
            "run": RUN,
            "local": self.locals[node],
            "remote_root": self.remote,
            "remote": ".",
            "policy": Policy(),
        }
        return Settings(**(fields | changes))

    def places(self, **changes: Any) -> Places:
        """Where a child of the first node's flusher works."""
        fields: dict[str, Any] = {
            "local": str(self.locals[0]),
            "remote_root": str(self.remote),
            "remote": ".",
            "identity": IDENTITY,
        }
        return Places(**(fields | changes))

    def tier(self) -> RemoteTier:
        """Both folders as a child of the first node's flusher has opened them."""
        return RemoteTier(self.places())

    def flush_once(self, node: int = 0, **changes: Any) -> Pass:
        return flush_once(self.settings(node, **changes))

    def write_state(self, node: int = 0, **changes: Any) -> None:
        state = a_state(**changes)
        with Folder.open(self.locals[node]) as folder:
            write_document(folder, state_file(state.rank), state)

    def start(self, node: int = 0, policy: Policy | None = None, **env: str) -> Any:
        """A flusher as a process of its own; it ends with the test."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tidegate_sidecar", "flush"],
            env=os.environ
            | {
                keys.ENV_RUN: RUN,
                keys.ENV_LOCAL: str(self.locals[node]),
                keys.ENV_REMOTE: str(self.remote),
                keys.ENV_POLICY: encode(policy or Policy()).decode(),
                keys.ENV_METRICS_PORT: "0",
            }
            | env,
            stderr=subprocess.DEVNULL,
        )
        self.flushers.append(process)
        return process

    def records(self) -> dict[int, StepRecord]:
        """Step → record of the remote tier."""
        with Folder.open(self.remote) as folder:
            return {record.attempt.step: record for record in scan_steps(folder, RUN_ID)}

    def durable(self) -> list[int]:
        return [step for step, record in self.records().items() if record.committed]


@pytest.fixture
def a_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes a run whose identity lies on both tiers; rank 0, so the lead, is on the first node."""
    runs: list[Run] = []

    def build(nodes: int = 1) -> Run:
        run = Run(remote=tmp_path / "remote")
        run.locals = [tmp_path / f"node{node}" for node in range(nodes)]
        for path in [run.remote, *run.locals]:
            path.mkdir()
            with Folder.open(path) as folder:
                write_document(folder, RUN_DOCUMENT, IDENTITY)
        for node in range(nodes):
            run.write_state(node, rank=node)
        runs.append(run)
        return run

    yield build
    for process in [process for run in runs for process in run.flushers]:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def a_certificate(folder: Path, name: str, address: str = "127.0.0.9") -> tuple[str, Path]:
    """A self-signed authority that is also the server; its PEM and a file with key and chain."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ip_address(address))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + pem
    )
    return pem.decode(), path


def wait_for(condition: Callable[[], Any], seconds: float = 8.0) -> Any:
    """Polls until the condition is truthy; fails with its last value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {seconds} s: {value!r}"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """The builders of the pure parts, for tests that need many of them."""
    return SimpleNamespace(
        view=a_view, commit=a_commit, remote=a_remote, state=a_state, attempt=attempt_of
    )


@pytest.fixture
def a_loop() -> Iterator[Callable[..., Loop]]:
    """Makes loops over the first node of a run, beaten by the test itself."""
    loops: list[tuple[Loop, Folder]] = []

    def build(run: Run, **changes: Any) -> Loop:
        folder = Folder.open(run.locals[0])
        loop = Loop(run.settings(**changes), folder, IDENTITY, Health())
        loops.append((loop, folder))
        return loop

    yield build
    for loop, folder in loops:
        loop.close()
        folder.close()


def beat_until(loop: Loop, condition: Callable[[], Any], seconds: float = 8.0) -> None:
    """Beats until the condition holds; no beat may ever wait for the remote tier."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} s"
        began = time.monotonic()
        assert loop.beat() is Beat.ON
        assert time.monotonic() - began < 3.0
        loop.wait()


def _as_fixture(function: Callable[..., Any]) -> Any:
    """Test modules cannot import this file, so each builder is a fixture of its own name."""

    def give() -> Callable[..., Any]:
        return function

    return pytest.fixture(scope="session", name=function.__name__)(give)


for _function in (
    attempt_of,
    a_view,
    a_commit,
    a_remote,
    a_state,
    a_sealed_step,
    a_certificate,
    wait_for,
    beat_until,
):
    globals()[f"fixture_{_function.__name__}"] = _as_fixture(_function)
