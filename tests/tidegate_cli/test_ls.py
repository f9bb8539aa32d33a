import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.document import decode
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import Attempt, step_folder
from tidegate_contract.publish import claim_lineage, write_seal
from tidegate_contract.seal import Seal
from tidegate_sidecar.removal import trash_step

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
OTHER_RUN_ID = "0c0a5f0e-0000-4000-8000-000000000000"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def steps_of(text: str) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in json.loads(text)["steps"]}


@pytest.fixture
def states(a_run: Any, a_step: Any, an_attempt: Any) -> Path:
    """A remote folder with a step of each state; its number says which."""
    run: Path = a_run()
    a_step(run, 1)
    with Folder.open(run) as folder:
        trash_step(folder, an_attempt(1))
    a_step(run, 2)
    a_step(run, 3, ranks=(0, 1), world_size=2, tier="open")
    a_step(run, 4, ranks=(0,), coming=(1,), world_size=2, tier="open")
    (run / step_folder(an_attempt(5))).mkdir()
    (a_step(run, 6) / "manifest.json").write_bytes(b"{}")
    return run


def test_ls_states_of_a_remote_folder_are_told_apart(states: Path, call: Any) -> None:
    answer = call("ls", states, "--json")
    want = {
        1: "dropped",
        2: "durable",
        3: "sealed",
        4: "incomplete",
        5: "empty",
        6: "damaged",
    }
    assert {step: row["state"] for step, row in steps_of(answer.out).items()} == want
    assert answer.code == 1, "something is damaged"


@pytest.mark.parametrize(
    ("step", "want"),
    [
        (1, "in .trash for an hour since it was moved there; a restore may still take it"),
        (2, "the newest durable step"),
        (3, "every rank delivered; the next flush or restore commits it"),
        (4, "rank 1 of 2 announced, not delivered yet"),
        (5, "no seal yet: it is being written, or its save died"),
    ],
    ids=["dropped", "durable", "sealed", "incomplete", "empty"],
)
def test_ls_state_is_explained(states: Path, call: Any, step: int, want: str) -> None:
    assert steps_of(call("ls", states, "--json").out)[step]["why"] == [want]
    assert f"    {want}\n" in call("ls", states).out


def test_ls_damaged_commit_names_its_file(states: Path, call: Any) -> None:
    (why,) = steps_of(call("ls", states, "--json").out)[6]["why"]
    assert why.endswith("manifest.json: does not match COMMIT")


def test_ls_sound_run_ends_well_and_fits_80_columns(a_run: Any, a_step: Any, call: Any) -> None:
    run = a_run()
    for step in (999_900, 1_000_000):
        a_step(run, step)
    answer = call("ls", run)
    assert answer.code == 0
    assert all(len(line) <= 80 for line in answer.out.splitlines()[1:])
    assert f"{1_000_000:016x}" in answer.out, "the attempt's name is whole"


@pytest.mark.parametrize("steps", [(9, 10, 99, 100, 9900, 10_000)], ids=["C006: numbers, not text"])
def test_ls_order_is_by_number_newest_first(
    a_run: Any, a_step: Any, call: Any, steps: tuple[int, ...]
) -> None:
    run = a_run()
    for step in steps:
        a_step(run, step)
    assert list(steps_of(call("ls", run, "--json").out)) == sorted(steps, reverse=True)


def test_ls_order_puts_lineage_before_step(a_run: Any, a_step: Any, call: Any) -> None:
    run = a_run()
    a_step(run, 20, lineage=1)
    a_step(run, 10, lineage=2)
    steps = steps_of(call("ls", run, "--json").out)
    assert list(steps) == [10, 20]
    assert steps[10]["newest"]


def test_ls_order_follows_an_explicit_restore(
    a_run: Any, a_step: Any, call: Any, an_attempt: Any
) -> None:
    run = a_run()
    a_step(run, 10)
    a_step(run, 20)
    with Folder.open(run) as folder:
        claim = LineageClaim(
            run_id=RUN_ID, number=2, restored=an_attempt(10), explicit=True, claimed_at=NOW
        )
        assert claim_lineage(folder, claim)
    steps = steps_of(call("ls", run, "--json").out)
    assert list(steps) == [10, 20]
    assert steps[10]["why"] == [
        "named by an explicit restore: counts as of lineage 2",
        "the newest durable step",
    ]


def test_ls_local_folders_complete_what_is_not_copied(a_run: Any, a_step: Any, call: Any) -> None:
    remote, near, far = a_run(), a_run("node0"), a_run("node1")
    a_step(near, 7, ranks=(0,), world_size=2, tier="local")
    a_step(far, 7, ranks=(1,), world_size=2, tier="local")
    answer = call("ls", remote, "--local", near, "--local", far, "--json")
    row = steps_of(answer.out)[7]
    assert (row["state"], row["why"]) == (
        "sealed",
        ["ranks 0-1 sealed on their nodes, not copied yet"],
    )
    assert " 2/2 " in call("ls", remote, "--local", near, "--local", far).out


def test_ls_superseded_attempt_says_by_what(a_run: Any, a_step: Any, call: Any) -> None:
    remote, near = a_run(), a_run("node0")
    a_step(remote, 8)
    a_step(near, 7, tier="local")
    row = steps_of(call("ls", remote, "--local", near, "--json").out)[7]
    assert row["why"] == ["superseded by step 8, which is durable"]


def a_foreign_folder(a_run: Any, _a_step: Any) -> Path:
    path: Path = a_run("other", run_id=OTHER_RUN_ID, run="team-b/bert")
    return path


def a_missing_folder(a_run: Any, _a_step: Any) -> Path:
    path: Path = a_run()
    return path.parent / "none"


def an_empty_folder(a_run: Any, _a_step: Any) -> Path:
    path: Path = a_run().parent / "empty"
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("build", "want"),
    [
        (a_foreign_folder, "other: belongs to another run (team-b/bert)"),
        (a_missing_folder, "none: No such file or directory"),
        (an_empty_folder, "empty: no run.json, so this is not a run's folder"),
    ],
    ids=["C127: another run's", "missing", "empty"],
)
def test_ls_odd_local_folder_is_a_line_beside_the_answer(
    a_run: Any, a_step: Any, call: Any, build: Callable[[Any, Any], Path], want: str
) -> None:
    remote = a_run()
    a_step(remote, 1)
    answer = call("ls", remote, "--local", build(a_run, a_step))
    assert answer.code == 1
    assert want in answer.err
    assert "durable" in answer.out


@pytest.mark.parametrize(
    "put",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.symlink_to("/etc"),
        lambda path: path.symlink_to(path.name),
    ],
    ids=["a file", "C036: a link", "a loop"],
)
def test_ls_strange_step_folder_is_a_line(
    a_run: Any, a_step: Any, call: Any, put: Callable[[Path], None]
) -> None:
    run = a_run()
    a_step(run, 1)
    name = step_folder(Attempt(step=2, nonce="00000000000000ff"))
    put(run / name)
    answer = call("ls", run)
    assert answer.code == 1
    assert f"{name}: not a folder, or a link to one" in answer.err
    assert "durable" in answer.out


def test_ls_unreadable_step_folder_is_a_line(
    a_run: Any, a_step: Any, call: Any, as_stranger: Any
) -> None:
    run = a_run(under=as_stranger.folder)
    a_step(run, 1)
    (closed := a_step(run, 2)).chmod(0)
    with as_stranger():
        answer = call("ls", run)
    closed.chmod(0o700)
    assert answer.code == 1
    assert f"{closed}: Permission denied" in answer.err


def test_ls_hostile_names_reach_no_terminal(a_run: Any, a_step: Any, call: Any) -> None:
    run = a_run()
    a_step(run, 1)
    for name in ("a\x1b[31mred", "[red]markup", "\u202eesrever", ":boom:"):
        (run / name).write_bytes(b"")
    (run / b"\xff\xfe".decode(errors="surrogateescape")).write_bytes(b"")
    answer = call("ls", run)
    assert answer.code == 0
    assert "\x1b" not in answer.out
    for want in (r"a\x1b[31mred", "[red]markup", r"\u202eesrever", ":boom:", r"\udcff\udcfe"):
        assert want in answer.out


def test_ls_documents_of_another_run_never_count(a_run: Any, a_step: Any, call: Any) -> None:
    run = a_run()
    a_step(run, 1, run_id=OTHER_RUN_ID)
    row = steps_of(call("ls", run, "--json").out)[1]
    assert row["state"] == "damaged"
    assert any("belongs to another" in why for why in row["why"])


def test_ls_newer_format_is_one_sentence(
    a_run: Any, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("tidegate_contract.document.FORMAT_VERSION", 2)
        run = a_run()
    answer = call("ls", run)
    assert (answer.code, answer.out) == (1, "")
    assert "version 2 is not known here; this release reads 1" in answer.err


@pytest.mark.parametrize(
    ("folder", "want"),
    [
        (lambda run: run / "none", "none: No such file or directory\n"),
        (lambda run: run / "run.json", "run.json: Not a directory\n"),
        (lambda run: run.parent, "not a run's folder (runs lie below it, as "),
        (
            lambda run: run / step_folder(Attempt(step=2, nonce=f"{2:016x}")),
            "not a run's folder (it is a step's folder: its run is the folder above)\n",
        ),
    ],
    ids=["missing", "a file", "above", "a step"],
)
def test_ls_wrong_folder_is_one_sentence(
    a_run: Any, a_step: Any, call: Any, folder: Callable[[Path], Path], want: str
) -> None:
    run = a_run()
    a_step(run, 2)
    answer = call("ls", folder(run))
    assert (answer.code, answer.out) == (1, "")
    assert want in answer.err
    assert answer.err.count("\n") == 1


def test_ls_new_run_has_no_steps_yet(a_run: Any, call: Any) -> None:
    answer = call("ls", a_run())
    assert answer.code == 0
    assert answer.out.endswith("no steps yet\n")


def test_ls_step_that_a_newer_release_wrote_is_unknown_not_damaged(
    a_run: Any, a_step: Any, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run()
    a_step(run, 1)
    with monkeypatch.context() as newer:
        newer.setattr("tidegate_contract.document.FORMAT_VERSION", 2)
        a_step(run, 2, tier="local")
    answer = call("ls", run, "--json")
    row = steps_of(answer.out)[2]
    assert (row["state"], row["why"][0]) == ("unknown", "a newer release wrote it")
    assert answer.code == 1
    assert "unknown" in call("ls", run).out


@dataclass(frozen=True, slots=True, kw_only=True)
class NewerSeal(Seal):
    colour: str = "blue"


def test_ls_step_whose_document_has_an_unknown_field_is_unknown(
    a_run: Any, a_step: Any, call: Any
) -> None:
    run = a_run()
    step = a_step(run, 2, tier="local")
    with Folder.open(step) as folder:
        data = folder.read("seal-0.json")
        assert data is not None
        seal = decode(Seal, data, "seal-0.json")
        write_seal(folder, NewerSeal(**{f.name: getattr(seal, f.name) for f in fields(seal)}))
    row = steps_of(call("ls", run, "--json").out)[2]
    assert (row["state"], row["why"][0]) == ("unknown", "a newer release wrote it")
    assert "field 'colour' is not known here" in row["why"][1]


def test_ls_step_with_damage_beside_what_is_newer_is_damaged(
    a_run: Any, a_step: Any, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run()
    step = a_step(run, 2, ranks=(0,), world_size=2, tier="local")
    (step / "weights-0.distcp").unlink()
    with monkeypatch.context() as newer:
        newer.setattr("tidegate_contract.document.FORMAT_VERSION", 2)
        a_step(run, 2, ranks=(1,), world_size=2, tier="local")
    assert steps_of(call("ls", run, "--json").out)[2]["state"] == "damaged"


def test_ls_missing_file_is_one_line(a_run: Any, a_step: Any, call: Any) -> None:
    run = a_run()
    step = a_step(run, 1)
    (step / "weights-0.distcp").unlink()
    why = steps_of(call("ls", run, "--json").out)[1]["why"]
    assert [line for line in why if "weights" in line] == [
        f"{step}/weights-0.distcp: missing (10000 bytes)"
    ]


def test_ls_missing_manifest_is_said_to_be_missing(a_run: Any, a_step: Any, call: Any) -> None:
    run = a_run()
    step = a_step(run, 1)
    (step / "manifest.json").unlink()
    (why,) = steps_of(call("ls", run, "--json").out)[1]["why"]
    assert why == f"{step}/manifest.json: missing"


@pytest.mark.parametrize("mode", [0, 0o444], ids=["closed", "names only"])
def test_ls_folder_that_cannot_be_read_is_one_sentence(
    a_run: Any, call: Any, as_stranger: Any, mode: int
) -> None:
    run = a_run(under=as_stranger.folder)
    run.chmod(mode)
    with as_stranger():
        answer = call("ls", run)
    run.chmod(0o700)
    what = f"{run}/run.json" if mode else f"{run}"
    assert (answer.code, answer.out, answer.err) == (1, "", f"{what}: Permission denied\n")


def test_ls_document_that_cannot_be_read_has_its_full_path(
    a_run: Any, a_step: Any, call: Any, as_stranger: Any
) -> None:
    run = a_run(under=as_stranger.folder)
    run.chmod(0o755)
    (run / "run.json").chmod(0o644)
    seal = a_step(run, 2, tier="local") / "seal-0.json"
    seal.parent.chmod(0o755)
    seal.chmod(0)
    with as_stranger():
        answer = call("ls", run)
    assert answer.code == 1
    assert f"{seal}: Permission denied\n" in answer.err
