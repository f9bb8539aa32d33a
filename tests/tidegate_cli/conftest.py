"""Runs of a few small steps on both tiers, written by the contract's own functions."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tidegate_cli.__main__ import app
from tidegate_contract.digest import ContentHasher
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import METADATA_REMOTE, Attempt, Part, data_file, step_folder
from tidegate_contract.publish import announce, commit_step, ensure_identity, write_seal
from tidegate_contract.seal import SaveReason, Seal, file_entry

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SMALL_BLOCK = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a person sees of one call."""

    code: int
    out: str
    err: str


@pytest.fixture
def call() -> Callable[..., Answer]:
    """Runs the command in this process, not on a terminal."""

    def run(*words: object, typed: str = "") -> Answer:
        done = CliRunner().invoke(app, [str(word) for word in words], input=typed)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return Answer(code=done.exit_code, out=done.stdout, err=done.stderr)

    return run


@pytest.fixture
def now() -> datetime:
    """When everything in these tests happens."""
    return NOW


@pytest.fixture
def a_run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder of the run on one tier."""

    def build(
        name: str = "pfs",
        run_id: str = RUN_ID,
        run: str = "team-a/llama",
        under: Path = tmp_path,
    ) -> Path:
        path = under / name
        path.mkdir(parents=True, exist_ok=True)
        with Folder.open(path) as folder:
            ensure_identity(folder, RunIdentity(run_id=run_id, name=run, uid=0, created_at=NOW))
        return path

    return build


class Stranger:
    """Becomes a user without any right for a while; `folder` is one that this user may enter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(before)


@pytest.fixture
def as_stranger() -> Iterator[Stranger]:
    """For what only rights can show: root may read everything."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-cli-"))
    folder.chmod(0o755)
    yield Stranger(folder)
    shutil.rmtree(folder)


@pytest.fixture
def an_attempt() -> Callable[..., Attempt]:
    """The attempt that `a_step` writes for a step unless it is told another."""

    def build(step: int, nonce: int | None = None) -> Attempt:
        return Attempt(step=step, nonce=f"{step if nonce is None else nonce:016x}")

    return build


def write_rank(step: Folder, seal: Seal, *, is_announced: bool, is_sealed: bool) -> None:
    contents = {data_file(Part.WEIGHTS, seal.rank): bytes([seal.rank + 1]) * 10_000}
    if seal.rank == 0:
        contents[METADATA_REMOTE] = b"metadata of the step"
    entries = []
    for name, data in contents.items():
        hasher = ContentHasher(SMALL_BLOCK)
        hasher.update(data)
        entries.append(file_entry(name, hasher.finish()))
        if is_sealed:
            with step.new_file(name) as file:
                file.write(data)
                file.publish(len(data))
    document = replace(seal, files=tuple(entries))
    if is_announced:
        announce(step, document)
    if is_sealed:
        write_seal(step, document)


@pytest.fixture
def a_step(an_attempt: Callable[..., Attempt]) -> Callable[..., Path]:
    """Writes one step into a run's folder and returns the step's folder.

    `tier` is "committed" or "open" on the remote tier, where ranks are announced, or "local". The
    ranks `coming` are announced only. Other keywords replace fields of the seals.
    """

    def build(
        run: Path,
        step: int,
        *,
        ranks: Sequence[int] = (0,),
        coming: Sequence[int] = (),
        tier: str = "committed",
        **changes: Any,
    ) -> Path:
        fields: dict[str, Any] = {
            "run_id": RUN_ID,
            "lineage": 1,
            "attempt": an_attempt(step),
            "tokens": 4_000_000 * step,
            "world_size": 1,
            "sealed_at": NOW + timedelta(seconds=step),
            "reason": SaveReason.CADENCE,
            "torch_version": "2.15.0",
            "files": (),
        }
        fields |= changes
        name = step_folder(fields["attempt"])
        with Folder.open(run) as folder, folder.ensure_child(name) as inside:
            for rank in (*ranks, *coming):
                seal = Seal(rank=rank, **fields)
                write_rank(inside, seal, is_announced=tier != "local", is_sealed=rank in ranks)
            if tier == "committed":
                assert commit_step(inside, fields["attempt"], fields["run_id"], NOW)
        return run / name

    return build
