"""A damaged `run.json`, of either tier, under a flusher: mended, or waited for with a sentence."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import QUARANTINE, RUN_DOCUMENT, step_folder
from tidegate_contract.publish import write_document
from tidegate_contract.run_documents import read_identity
from tidegate_sidecar import flush as flusher
from tidegate_sidecar.flush import Ending, flush
from tidegate_sidecar.health import Health
from tidegate_sidecar.tasks import open_remote

Build = Callable[..., Any]
OTHER_ID = "0c0a5f0e-0000-4000-8000-000000000000"


def flip_bit(folder: Path) -> bytes:
    path = folder / RUN_DOCUMENT
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return bytes(data)


def identity_of(folder: Path) -> RunIdentity:
    with Folder.open(folder) as run:
        found = read_identity(run)
    assert found is not None
    return found


def as_mended(sound: RunIdentity) -> RunIdentity:
    """What a flusher writes: the user that a tenant's document names is not vouched for."""
    return replace(sound, uid=os.geteuid())


def test_damaged_remote_identity_is_mended_by_a_single_pass(
    a_run: Build, a_sealed_step: Build
) -> None:
    run = a_run()
    want = as_mended(identity_of(run.remote))
    a_sealed_step(run.locals[0], 10)
    run.flush_once()
    a_sealed_step(run.locals[0], 20)
    damaged = flip_bit(run.remote)
    assert run.flush_once().is_whole
    assert run.durable() == [10, 20]
    assert identity_of(run.remote) == want
    (aside,) = (run.remote / QUARANTINE).iterdir()
    assert aside.read_bytes() == damaged


def test_damaged_remote_identity_is_mended_while_the_flusher_runs(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build
) -> None:
    run = a_run()
    flip_bit(run.remote)
    a_sealed_step(run.locals[0], 10)
    beat_until(a_loop(run), run.durable)
    assert identity_of(run.remote) == as_mended(identity_of(run.locals[0]))


def test_two_flushers_that_mend_the_remote_identity_at_once_agree(a_run: Build) -> None:
    run = a_run()
    damaged = flip_bit(run.remote)
    places = run.places()
    threads = [threading.Thread(target=lambda: open_remote(places).close()) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert identity_of(run.remote) == as_mended(identity_of(run.locals[0]))
    assert [path.read_bytes() for path in (run.remote / QUARANTINE).iterdir()] == [damaged]


@pytest.mark.parametrize("is_in_memory", [True, False], ids=["running flusher", "single pass"])
def test_damaged_local_identity_is_mended_by_who_knows_it(
    a_run: Build, a_sealed_step: Build, a_loop: Build, is_in_memory: bool
) -> None:
    run = a_run()
    want = identity_of(run.locals[0])
    if is_in_memory:
        loop = a_loop(run)
        (run.locals[0] / step_folder(a_sealed_step(run.remote, 5))).mkdir()
        damaged = flip_bit(run.locals[0])
        with Folder.open(run.locals[0]) as folder:
            flusher._beat(loop, folder, identity_of(run.remote))
    else:
        a_sealed_step(run.locals[0], 10)
        damaged = flip_bit(run.locals[0])
        assert run.flush_once().is_whole
        assert run.durable() == [10]
        want = replace(want, uid=os.getuid())  # never a stranger that the remote one may name
    assert identity_of(run.locals[0]) == want
    (aside,) = (run.locals[0] / QUARANTINE).iterdir()
    assert aside.read_bytes() == damaged


class EndingAfter(Ending):
    """Told to end when a condition holds."""

    def __init__(self, condition: Callable[[], Any]) -> None:
        super().__init__(follows_parent=False)
        self._condition = condition

    @property
    def is_due(self) -> bool:
        return bool(self._condition())


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the flusher says of itself; it does not sleep."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(Health, "beat", lambda _, **words: told.append(words))
    monkeypatch.setattr(flusher.time, "sleep", lambda _: None)
    return told


def test_flusher_that_starts_on_a_damaged_local_identity_waits_and_says_so_once(
    a_run: Build, words: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    run = a_run()
    damaged = flip_bit(run.locals[0])
    assert flush(run.settings(), EndingAfter(lambda: len(words) > 5)) == 0
    assert {word["phase"] for word in words} == {"WaitingForRun"}
    assert "the trainer writes it anew when it starts" in words[0]["message"]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert (run.locals[0] / RUN_DOCUMENT).read_bytes() == damaged


def test_flusher_that_waited_goes_on_once_the_trainer_has_mended_it(
    a_run: Build, a_sealed_step: Build, words: list[dict[str, Any]]
) -> None:
    run = a_run()
    want = (run.locals[0] / RUN_DOCUMENT).read_bytes()
    a_sealed_step(run.locals[0], 10)
    flip_bit(run.locals[0])

    def is_over() -> bool:
        if len(words) == 3:
            (run.locals[0] / RUN_DOCUMENT).write_bytes(want)
        return bool(run.durable())

    assert flush(run.settings(), EndingAfter(is_over)) == 0
    assert run.durable() == [10]


def once(run: Any, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tidegate_sidecar", "flush", "--once", *more]
    places = ["--local", str(run.locals[0]), "--remote", str(run.remote)]
    return subprocess.run([*command, *places], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("why", ["both damaged", "no remote copy", "other steps"])
def test_single_pass_that_knows_no_run_ends_with_one_sentence_and_status_1(
    a_run: Build, a_sealed_step: Build, why: str
) -> None:
    run = a_run()
    a_sealed_step(run.locals[0], 10, run_id=OTHER_ID if why == "other steps" else run_id_of(run))
    damaged = flip_bit(run.locals[0])
    if why == "both damaged":
        flip_bit(run.remote)
    if why == "no remote copy":
        (run.remote / RUN_DOCUMENT).unlink()
    done = once(run)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert f"{run.locals[0]}/{RUN_DOCUMENT}: " in done.stderr
    assert (run.locals[0] / RUN_DOCUMENT).read_bytes() == damaged


def run_id_of(run: Any) -> str:
    return identity_of(run.remote).run_id


def test_damaged_remote_identity_of_another_run_is_not_taken(
    a_run: Build, a_sealed_step: Build
) -> None:
    run = a_run()
    a_sealed_step(run.locals[0], 10)
    a_sealed_step(run.remote, 20, run_id=OTHER_ID)
    with Folder.open(run.remote) as far:
        write_document(
            far, RUN_DOCUMENT, RunIdentity(**(as_fields(run.locals[0]) | {"run_id": OTHER_ID}))
        )
    damaged = flip_bit(run.remote)
    done = run.flush_once()
    assert not done.is_whole
    assert f"is of run {OTHER_ID}" in done.lines[0]
    assert (run.remote / RUN_DOCUMENT).read_bytes() == damaged


def as_fields(folder: Path) -> dict[str, Any]:
    found = identity_of(folder)
    return {name: getattr(found, name) for name in ("name", "owner_uid", "uid", "created_at")}
