import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidegate_cli.__main__ import app
from tidegate_contract.digest import ContentHasher
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import METADATA_REMOTE, TRASH, Attempt, step_folder
from tidegate_contract.publish import commit_step, ensure_identity, write_seal
from tidegate_contract.seal import SaveReason, Seal, file_entry

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one rank: step 2 durable, step 1 dropped, step 3 not committed."""
    with Folder.open(tmp_path) as folder:
        identity = RunIdentity(run_id=RUN_ID, name="team-a/llama", uid=0, created_at=NOW)
        ensure_identity(folder, identity)
        for number in (1, 2, 3):
            attempt = Attempt(step=number, nonce=f"{number:016x}")
            with folder.ensure_child(step_folder(attempt)) as step:
                write_step(step, attempt)
                if number < 3:
                    assert commit_step(step, attempt, RUN_ID, NOW)
        dropped = step_folder(Attempt(step=1, nonce=f"{1:016x}"))
        with folder.ensure_child(TRASH) as trash:
            folder.rename(dropped, dropped, into=trash)
    return tmp_path


def write_step(step: Folder, attempt: Attempt) -> None:
    data = b"metadata of the step"
    hasher = ContentHasher()
    hasher.update(data)
    with step.new_file(METADATA_REMOTE) as file:
        file.write(data)
        file.publish(len(data))
    seal = Seal(
        run_id=RUN_ID,
        lineage=1,
        attempt=attempt,
        tokens=10 * attempt.step,
        rank=0,
        world_size=1,
        sealed_at=NOW,
        reason=SaveReason.CADENCE,
        torch_version="2.15.0",
        files=(file_entry(METADATA_REMOTE, hasher.finish()),),
    )
    write_seal(step, seal)


def call(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.output


def test_ls_tells_durable_from_dropped_and_unfinished(run: Path) -> None:
    code, text = call("ls", run, "--json")
    steps = {row["step"]: row["state"] for row in json.loads(text)["steps"]}
    assert (code, steps) == (0, {1: "dropped", 2: "durable", 3: "1 of 1 ranks"})


def test_ls_never_cuts_an_attempts_name(run: Path) -> None:
    _, text = call("ls", run)
    assert step_folder(Attempt(step=2, nonce=f"{2:016x}")) in text


def test_verify_counts_durable_steps_and_names_damage(run: Path) -> None:
    assert call("verify", run) == (0, "1 of 1 durable steps are sound\n")
    damaged = run / step_folder(Attempt(step=2, nonce=f"{2:016x}")) / METADATA_REMOTE
    damaged.write_bytes(damaged.read_bytes()[::-1])
    code, text = call("verify", run)
    assert code == 1
    assert "block 0 of 1 is damaged" in text


@pytest.mark.parametrize(
    ("folder", "want"),
    [
        (lambda run: run / "none", "No such file or directory"),
        (lambda run: run.parent, "not a run's folder"),
        (
            lambda run: run / step_folder(Attempt(step=2, nonce=f"{2:016x}")),
            "its run is the folder above",
        ),
    ],
    ids=["missing", "no run", "a step"],
)
def test_wrong_folder_is_one_sentence(run: Path, folder: Callable[[Path], Path], want: str) -> None:
    code, text = call("ls", folder(run))
    assert code == 1
    assert want in text
    assert "Traceback" not in text
