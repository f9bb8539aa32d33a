import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, Pin
from tidegate_contract.layout import METADATA_REMOTE, step_folder
from tidegate_contract.publish import claim_lineage, write_pin
from tidegate_contract.verify import verify_step
from tidegate_sidecar.removal import trash_step

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
WEIGHTS = "weights-0.distcp"


def flip(path: Path, offset: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture
def run(a_run: Any, a_step: Any) -> Path:
    """A remote folder with steps 1 and 2, both durable, and 3, which is on its way."""
    path: Path = a_run()
    a_step(path, 1)
    a_step(path, 2)
    a_step(path, 3, ranks=(0,), coming=(1,), world_size=2, tier="open")
    return path


def step_of(run: Path, step: int) -> Path:
    return next(run.glob(f"step-*{step:04d}.*"))


def test_verify_sound_run_ends_well(run: Path, call: Any) -> None:
    answer = call("verify", run)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "3 of 3 steps are sound, 29.4 KiB read\n"


@pytest.mark.parametrize(
    "name",
    [
        WEIGHTS,
        METADATA_REMOTE,
        ".metadata",
        "seal-0.json",
        "announced-0.json",
        "manifest.json",
        "COMMIT",
    ],
)
def test_verify_one_flipped_bit_is_found_and_named(run: Path, call: Any, name: str) -> None:
    flip(step_of(run, 2) / name, -3)
    answer = call("verify", run)
    assert answer.code == 1
    assert f"{step_of(run, 2).name}/{name.removesuffix('COMMIT')}" in answer.err


def test_verify_stops_at_the_first_damage_unless_told(run: Path, call: Any) -> None:
    for step in (1, 2):
        flip(step_of(run, step) / WEIGHTS, 0)
        flip(step_of(run, step) / WEIGHTS, -1)
    first = call("verify", run)
    assert first.err.count("\n") == 1
    assert first.err.startswith(f"{step_of(run, 2)}/{WEIGHTS}: block 0 of 3 is damaged")
    assert "stopped at the first damage; --all reads on\n" in first.out
    every = call("verify", run, "--all")
    assert [answer.code for answer in (first, every)] == [1, 1]
    assert every.err.count(f"{WEIGHTS}: block 0 of 3") == 2
    assert every.err.count(f"{WEIGHTS}: block 2 of 3") == 2
    assert every.out == "1 of 3 steps are sound, 29.4 KiB read\n"


def test_verify_one_steps_folder_reads_that_alone(run: Path, call: Any) -> None:
    flip(step_of(run, 1) / WEIGHTS)
    answer = call("verify", step_of(run, 2))
    assert (answer.code, answer.out) == (0, "1 of 1 step is sound, 9.8 KiB read\n")
    assert call("verify", step_of(run, 1)).code == 1


def test_verify_local_copy_is_judged_by_its_seal(a_run: Any, a_step: Any, call: Any) -> None:
    run = a_run("node0")
    step = a_step(run, 1, tier="local")
    assert call("verify", run).code == 0
    flip(step / WEIGHTS, 5000)
    answer = call("verify", run)
    assert answer.code == 1
    assert f"{WEIGHTS}: block 1 of 3 is damaged" in answer.err


def test_verify_copy_that_lies_alone_names_its_own_run(
    run: Path, call: Any, tmp_path: Path
) -> None:
    alone = tmp_path / "backup" / step_of(run, 2).name
    shutil.copytree(step_of(run, 2), alone)
    assert call("verify", alone).code == 0
    flip(alone / "manifest.json", -3)
    answer = call("verify", alone)
    assert answer.code == 1
    assert "manifest.json" in answer.err


def test_verify_step_that_nothing_is_sealed_in_is_not_well(
    run: Path, call: Any, an_attempt: Any
) -> None:
    empty = run / step_folder(an_attempt(9))
    empty.mkdir()
    answer = call("verify", empty)
    assert (answer.code, answer.out) == (1, "")
    assert "nothing is sealed here" in answer.err


def test_verify_dropped_step_is_read_when_named_only(run: Path, call: Any, an_attempt: Any) -> None:
    flip(step_of(run, 1) / WEIGHTS)
    with Folder.open(run) as folder:
        trash_step(folder, an_attempt(1))
    assert call("verify", run).code == 0
    assert call("verify", step_of(run / ".trash", 1)).code == 1


def spoil_claim(run: Path, folder: Folder, attempt: Any) -> str:
    claim_lineage(folder, LineageClaim(run_id=RUN_ID, number=1, claimed_at=attempt[1]))
    flip(run / "lineages" / "1.json", -5)
    return "lineages/1.json"


def spoil_pin(run: Path, folder: Folder, attempt: Any) -> str:
    write_pin(folder, Pin(run_id=RUN_ID, attempt=attempt[0], pinned_at=attempt[1]))
    name = f"pins/{step_of(run, 1).name}.json"
    flip(run / name, -5)
    return name


def foreign_pin(run: Path, folder: Folder, attempt: Any) -> str:
    write_pin(folder, Pin(run_id="another", attempt=attempt[0], pinned_at=attempt[1]))
    return f"pins/{step_of(run, 1).name}.json: belongs to another run"


def misnamed_pin(run: Path, folder: Folder, attempt: Any) -> str:
    write_pin(folder, Pin(run_id=RUN_ID, attempt=attempt[0], pinned_at=attempt[1]))
    name = f"{step_of(run, 2).name}.json"
    (run / "pins" / f"{step_of(run, 1).name}.json").rename(run / "pins" / name)
    return f"pins/{name}: is the document of {step_of(run, 1).name}.json"


@pytest.mark.parametrize("spoil", [spoil_claim, spoil_pin, foreign_pin, misnamed_pin])
def test_verify_reads_the_runs_documents(
    run: Path, call: Any, an_attempt: Any, now: Any, spoil: Callable[..., str]
) -> None:
    with Folder.open(run) as folder:
        want = spoil(run, folder, (an_attempt(1), now))
    first, every = call("verify", run), call("verify", run, "--all")
    assert [answer.code for answer in (first, every)] == [1, 1]
    assert want in first.err
    for answer in (first, every):
        assert "3 of 3 steps are sound" in answer.out, "the steps are read all the same"


def test_verify_step_that_retention_took_meanwhile_is_not_damaged(
    run: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = str(step_of(run, 2))

    def read(step: Folder, *rest: Any, **options: Any) -> list[str]:
        if step.path == taken:
            shutil.rmtree(step.path)
        return verify_step(step, *rest, **options)

    monkeypatch.setattr("tidegate_cli.verify.verify_step", read)
    answer = call("verify", run)
    assert answer.code == 0
    assert answer.err == "step 2 was removed while it was read\n"
    assert "2 of 3 steps are sound" in answer.out


def test_verify_file_that_cannot_be_read_is_damage(
    a_run: Any, a_step: Any, call: Any, as_stranger: Any
) -> None:
    run = a_run(under=as_stranger.folder)
    for path in a_step(run, 1).iterdir():
        path.chmod(0o644)
    (step_of(run, 1) / WEIGHTS).chmod(0)
    with as_stranger():
        answer = call("verify", run)
    assert answer.code == 1
    assert f"{WEIGHTS}: cannot be read (Permission denied)" in answer.err


def test_verify_folder_that_cannot_be_read_is_named(
    a_run: Any, a_step: Any, call: Any, as_stranger: Any
) -> None:
    run = a_run(under=as_stranger.folder)
    a_step(run, 1).chmod(0)
    with as_stranger():
        answer = call("verify", run)
    step_of(run, 1).chmod(0o700)
    assert answer.code == 1
    assert f"{step_of(run, 1)}: Permission denied" in answer.err


@pytest.mark.parametrize("words", [(), ("--all",), ("--json",)], ids=["text", "all", "json"])
def test_verify_run_without_steps_is_not_well(
    a_run: Any, call: Any, words: tuple[str, ...]
) -> None:
    answer = call("verify", a_run(), *words)
    assert (answer.code, answer.out) == (1, "")
    assert "nothing is sealed here" in answer.err


def test_verify_json_has_the_documented_shape(run: Path, call: Any) -> None:
    flip(step_of(run, 2) / WEIGHTS)
    document = json.loads(call("verify", run, "--json").out)
    assert set(document) == {
        "run",
        "path",
        "sound",
        "damaged",
        "whole",
        "problems",
        "steps",
        "unknown",
    }
    assert (document["sound"], document["damaged"], document["whole"]) == (1, 1, False)
    damaged = document["steps"][1]
    assert (damaged["step"], damaged["verdict"]) == (2, "damaged")
    assert damaged["problems"] == [f"{step_of(run, 2)}/{WEIGHTS}: block 0 of 3 is damaged"]


@pytest.mark.parametrize("words", [(), ("--all",)], ids=["plain", "all"])
def test_verify_strange_step_folder_stops_nothing_and_counts(
    run: Path, call: Any, an_attempt: Any, words: tuple[str, ...]
) -> None:
    stray = run / step_folder(an_attempt(99))
    stray.write_bytes(b"")
    answer = call("verify", run, *words)
    assert answer.code == 1
    assert answer.out.startswith("3 of 4 steps are sound, 29.4 KiB read\n")
    assert answer.err == f"{stray}: not a folder, or a link to one\n"
    (step,) = json.loads(call("verify", run, "--json").out)["steps"][3:]
    assert (step["folder"], step["verdict"]) == (str(stray), "damaged")


def test_verify_step_that_a_newer_release_wrote_is_unknown(
    run: Path, a_step: Any, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("tidegate_contract.document.FORMAT_VERSION", 2)
        a_step(run, 5, tier="local")
    answer = call("verify", run)
    assert answer.code == 1
    assert "version 2 is not known here" in answer.err
    assert answer.out == "3 of 4 steps are sound, 1 is of a newer release, 29.4 KiB read\n"
    document = json.loads(call("verify", run, "--json").out)
    assert (document["damaged"], document["unknown"], document["whole"]) == (0, 1, True)
    assert document["steps"][-1]["verdict"] == "unknown"


def test_verify_renamed_step_says_what_its_documents_want(
    run: Path, call: Any, an_attempt: Any
) -> None:
    name = step_of(run, 2).name
    renamed = step_of(run, 2).rename(run / step_folder(an_attempt(8)))
    answer = call("verify", renamed)
    assert answer.code == 1
    assert answer.err == f"{renamed}: its documents want the name {name}\n"
    other = renamed.rename(run / "backup")
    answer = call("verify", other)
    assert answer.code == 1
    assert f"(a step's folder under another name: its documents want {name})" in answer.err


def test_verify_missing_file_is_one_line(run: Path, call: Any) -> None:
    (step_of(run, 2) / WEIGHTS).unlink()
    answer = call("verify", run, "--all")
    assert answer.err == f"{step_of(run, 2)}/{WEIGHTS}: missing (10000 bytes)\n"


def test_verify_missing_manifest_is_said_to_be_missing(run: Path, call: Any) -> None:
    (step_of(run, 2) / "manifest.json").unlink()
    answer = call("verify", run)
    assert answer.err == f"{step_of(run, 2)}/manifest.json: missing\n"
