import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, Pin
from tidegate_contract.layout import TRASH
from tidegate_contract.publish import claim_lineage, write_pin
from tidegate_sidecar.removal import trash_step

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"


@pytest.fixture
def run(a_run: Any, a_step: Any) -> Path:
    """A remote folder: 1, 2 and 3 durable, 4 on its way."""
    path: Path = a_run()
    for step in (1, 2, 3):
        a_step(path, step)
    a_step(path, 4, ranks=(0,), coming=(1,), world_size=2, tier="open")
    return path


def steps_in(folder: Path) -> set[int]:
    return {int(path.name[5:25]) for path in folder.glob("step-*")}


def claim(run: Path, attempt: Any, now: datetime, *, explicit: bool, number: int = 2) -> None:
    with Folder.open(run) as folder:
        document = LineageClaim(
            run_id=RUN_ID, number=number, restored=attempt, explicit=explicit, claimed_at=now
        )
        assert claim_lineage(folder, document)


def test_rm_moves_to_trash_and_says_how_to_undo_it(run: Path, call: Any) -> None:
    answer = call("rm", 1, "--run-folder", run, "--yes")
    assert answer.code == 0
    assert (steps_in(run), steps_in(run / TRASH)) == ({2, 3, 4}, {1})
    *_, undo, _ = answer.out.splitlines()
    assert undo.strip() == f"tidegate pin 1 --run-folder {run}"
    assert call(*undo.split()[1:]).code == 0
    assert steps_in(run) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("typed", "want"), [("y\n", {1}), ("n\n", set()), ("", set())], ids=["yes", "no", "nobody"]
)
def test_rm_asks_first(
    run: Path, call: Any, typed: str, want: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate_cli.rm.can_ask", lambda: True)
    answer = call("rm", 1, "--run-folder", run, typed=typed)
    assert (
        "Move step 1 of team-a/llama (attempt 0000000000000001, 9.8 KiB) to .trash?" in answer.err
    )
    assert steps_in(run / TRASH) == want
    assert answer.code == (0 if want else 1)


def test_rm_now_leaves_nothing(run: Path, call: Any) -> None:
    answer = call("rm", 1, "--run-folder", run, "--now", "--yes")
    assert (answer.code, answer.out) == (0, "step 1 of team-a/llama is removed\n")
    assert list((run / TRASH).iterdir()) == []


def test_rm_now_empties_what_was_dropped_before(run: Path, call: Any) -> None:
    call("rm", 1, "--run-folder", run, "--yes")
    again = call("rm", 1, "--run-folder", run, "--yes")
    assert (again.code, again.err) == (1, "step 1 is in .trash already; --now empties it\n")
    assert call("rm", 1, "--run-folder", run, "--now", "--yes").code == 0
    assert list((run / TRASH).iterdir()) == []


def test_rm_now_leaves_files_that_are_not_ours(run: Path, call: Any) -> None:
    (next(run.glob("step-*1.*")) / "notes.txt").write_bytes(b"mine")
    answer = call("rm", 1, "--run-folder", run, "--now", "--yes")
    assert answer.code == 0
    assert "holds files that are not of the format" in answer.err
    assert [path.name for path in (run / TRASH).glob("*/*")] == ["notes.txt"]


@pytest.mark.parametrize(
    ("step", "want"),
    [
        (3, "step 3 is the newest good one: a restore needs it\n"),
        (4, "step 4 is not durable in {run}: it has no COMMIT there; durable are 1, 2, 3\n"),
        (9, "step 9 is not durable: it is not in {run}; durable are 1, 2, 3\n"),
    ],
    ids=["newest", "on its way", "unknown"],
)
@pytest.mark.parametrize("words", [(), ("--now",)], ids=["to trash", "at once"])
def test_rm_what_must_stay_is_refused(
    run: Path, call: Any, step: int, want: str, words: tuple[str, ...]
) -> None:
    answer = call("rm", step, "--run-folder", run, "--yes", *words)
    assert (answer.code, answer.err) == (1, want.format(run=run))
    assert steps_in(run) == {1, 2, 3, 4}


def test_rm_newest_is_by_lineage_then_step(run: Path, a_step: Any, call: Any) -> None:
    a_step(run, 0, lineage=2)
    assert call("rm", 0, "--run-folder", run, "--yes").code == 1
    assert call("rm", 3, "--run-folder", run, "--yes").code == 0


def test_rm_pinned_step_is_refused(run: Path, call: Any) -> None:
    call("pin", 1, "--run-folder", run)
    answer = call("rm", 1, "--run-folder", run, "--yes")
    assert (answer.code, answer.err) == (1, "step 1 is pinned: unpin it first\n")


def test_rm_step_of_an_explicit_restore_is_refused_though_newer_ones_are_durable(
    run: Path, a_step: Any, call: Any, an_attempt: Any, now: datetime
) -> None:
    claim(run, an_attempt(1), now, explicit=True)
    a_step(run, 5, lineage=2)
    answer = call("rm", 1, "--run-folder", run, "--yes")
    assert answer.code == 1
    assert "named by the last explicit restore (lineage 2)" in answer.err
    assert call("rm", 3, "--run-folder", run, "--yes").code == 0


def test_rm_spares_what_a_damaged_claim_may_have_named_until_its_lineage_is_durable(
    run: Path, a_step: Any, call: Any, an_attempt: Any, now: datetime
) -> None:
    claim(run, an_attempt(1), now, explicit=True)
    (run / "lineages" / "2.json").write_text("")
    answer = call("rm", 1, "--run-folder", run, "--yes")
    assert answer.code == 1
    assert "lineages/2.json is damaged and may name step 1" in answer.err
    a_step(run, 5, lineage=2)
    assert call("rm", 1, "--run-folder", run, "--yes").code == 0


@pytest.mark.parametrize("words", [(), ("--now",)], ids=["to trash", "at once"])
def test_rm_spares_what_training_goes_on_from_until_its_lineage_is_durable(
    run: Path, a_step: Any, call: Any, an_attempt: Any, now: datetime, words: tuple[str, ...]
) -> None:
    claim(run, an_attempt(2), now, explicit=False)
    answer = call("rm", 2, "--run-folder", run, "--yes", *words)
    assert answer.code == 1
    assert "step 2 is what lineage 2 goes on from" in answer.err
    assert "    lineage 2 goes on from it\n" in call("ls", run).out
    a_step(run, 5, lineage=2)
    assert call("rm", 2, "--run-folder", run, "--yes", *words).code == 0
    assert "goes on from it" not in call("ls", run).out


def test_rm_of_a_step_pinned_in_the_same_moment_gives_it_back(
    run: Path, call: Any, an_attempt: Any, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin_then_move(folder: Folder, attempt: Any) -> bool:
        write_pin(folder, Pin(run_id=RUN_ID, attempt=attempt, pinned_at=now))
        return trash_step(folder, attempt)

    monkeypatch.setattr("tidegate_cli.rm.trash_step", pin_then_move)
    answer = call("rm", 1, "--run-folder", run, "--yes", "--now")
    assert (answer.code, answer.err) == (1, "step 1 was pinned meanwhile: it stays\n")
    assert 1 in steps_in(run)


def test_rm_decides_again_after_the_answer(
    run: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_the_newest(*_: object, **__: object) -> bool:
        for step in (2, 3):
            (next(run.glob(f"step-*{step}.*")) / "COMMIT").unlink()
        return True

    monkeypatch.setattr("tidegate_cli.rm.can_ask", lambda: True)
    monkeypatch.setattr("typer.confirm", lose_the_newest)
    answer = call("rm", 1, "--run-folder", run)
    assert answer.code == 1
    assert "step 1 is the newest good one" in answer.err
    assert 1 in steps_in(run)


def test_rm_rests_on_a_commit_that_holds(
    run: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate_cli.rm.is_durable", lambda *_: False)
    answer = call("rm", 1, "--run-folder", run, "--yes")
    assert answer.code == 1
    assert "step 3, the newest one, does not hold: nothing is removed" in answer.err
    assert 1 in steps_in(run)


def test_rm_json_has_the_documented_shape(run: Path, call: Any) -> None:
    answer = call("rm", 1, "--run-folder", run, "--yes", "--json")
    assert json.loads(answer.out) == {
        "run": "team-a/llama",
        "step": 1,
        "attempt": "0000000000000001",
        "done": "dropped",
        "left_in_trash": False,
    }


def test_rm_without_a_terminal_needs_yes(run: Path, call: Any) -> None:
    answer = call("rm", 1, "--run-folder", run, typed="y\n")
    assert answer.code == 2
    assert "not a terminal: add --yes" in answer.err
    assert steps_in(run) == {1, 2, 3, 4}
