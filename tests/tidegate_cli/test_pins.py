import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.layout import TRASH, Attempt
from tidegate_contract.publish import write_pin
from tidegate_contract.run_documents import scan_pins
from tidegate_sidecar.removal import trash_step


@pytest.fixture
def run(a_run: Any, a_step: Any) -> Path:
    """A remote folder: 1 and 2 durable, 3 on its way, 4 durable twice."""
    path: Path = a_run()
    a_step(path, 1)
    a_step(path, 2)
    a_step(path, 3, ranks=(0,), coming=(1,), world_size=2, tier="open")
    for nonce in ("00000000000000aa", "00000000000000bb"):
        a_step(path, 4, attempt=Attempt(step=4, nonce=nonce))
    return path


def pinned(run: Path) -> set[int]:
    with Folder.open(run) as folder:
        return {attempt.step for attempt in scan_pins(folder)}


def test_pin_holds_a_durable_step_and_ls_shows_why(run: Path, call: Any) -> None:
    answer = call("pin", 1, "--run-folder", run, "--reason", "before [red]decay")
    assert (answer.code, answer.out) == (0, "step 1 of team-a/llama is pinned\n")
    assert pinned(run) == {1}
    assert "    pinned: before [red]decay\n" in call("ls", run).out


def test_pin_twice_keeps_the_last_reason(run: Path, call: Any) -> None:
    for reason in ("first", "second"):
        assert call("pin", 1, "--run-folder", run, "--reason", reason).code == 0
    assert "pinned: second" in call("ls", run).out


def test_pin_again_keeps_the_reason_unless_told(run: Path, call: Any) -> None:
    call("pin", 1, "--run-folder", run, "--reason", "before decay")
    assert call("pin", 1, "--run-folder", run).code == 0
    assert "pinned: before decay\n" in call("ls", run).out
    assert call("pin", 1, "--run-folder", run, "--reason", "").code == 0
    assert "pinned\n" in call("ls", run).out


@pytest.mark.parametrize(
    ("step", "want"),
    [
        ("3", "step 3 is not durable in {run}: it has no COMMIT there; durable are 1, 2, 4\n"),
        ("9", "step 9 is not durable: it is not in {run}; durable are 1, 2, 4\n"),
        (
            "4",
            "step 4 has 2 attempts, name one of them: step-00000000000000000004.00000000000000aa",
        ),
    ],
    ids=["on its way", "C137: missing", "two attempts"],
)
def test_pin_what_is_not_one_durable_step_fails_at_once(
    run: Path, call: Any, step: str, want: str
) -> None:
    answer = call("pin", step, "--run-folder", run)
    assert answer.code == 1
    assert want.format(run=run) in answer.err
    assert pinned(run) == set()


def test_pin_names_an_attempt_by_its_folder(run: Path, call: Any) -> None:
    name = "step-00000000000000000004.00000000000000bb"
    assert call("pin", name, "--run-folder", run).code == 0
    assert [path.name for path in (run / "pins").iterdir()] == [f"{name}.json"]


def test_pin_damaged_step_names_its_file(run: Path, call: Any) -> None:
    (next(run.glob("step-*1.*")) / "weights-0.distcp").unlink()
    answer = call("pin", 1, "--run-folder", run)
    assert answer.code == 1
    assert "weights-0.distcp: missing (10000 bytes)" in answer.err


def test_pin_brings_a_dropped_step_back(run: Path, call: Any, an_attempt: Any) -> None:
    with Folder.open(run) as folder:
        assert trash_step(folder, an_attempt(1))
    answer = call("pin", 1, "--run-folder", run)
    assert answer.out == "step 1 of team-a/llama is pinned; it is back from .trash\n"
    assert list((run / TRASH).iterdir()) == []
    assert call("verify", run).code == 0


def on_writing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Something happens right before the pin is written."""

    def write(*words: Any) -> None:
        act()
        write_pin(*words)

    monkeypatch.setattr("tidegate_sidecar.pinning.write_pin", write)


def test_pin_of_a_step_that_retention_is_moving_holds(
    run: Path, call: Any, an_attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move() -> None:
        with Folder.open(run) as folder:
            trash_step(folder, an_attempt(1))

    on_writing(monkeypatch, move)
    answer = call("pin", 1, "--run-folder", run)
    assert answer.code == 0, "C137: pin one that retention is about to delete"
    assert next(run.glob("step-*1.*")).is_dir()
    assert pinned(run) == {1}


def test_pin_of_a_step_that_was_emptied_meanwhile_is_told_to_hold_nothing(
    run: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_writing(monkeypatch, lambda: shutil.rmtree(next(run.glob("step-*1.*"))))
    answer = call("pin", 1, "--run-folder", run)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == (
        "step 1 was removed meanwhile; its pin holds nothing: tidegate unpin 1 takes it away\n"
    )
    assert call("unpin", 1, "--run-folder", run).code == 0
    assert pinned(run) == set()


def test_unpin_takes_any_pin_away_even_a_damaged_one(run: Path, call: Any) -> None:
    call("pin", 1, "--run-folder", run)
    next((run / "pins").iterdir()).write_bytes(b"{")
    assert "document is damaged" in call("ls", run).out
    answer = call("unpin", 1, "--run-folder", run)
    assert (answer.code, answer.out) == (0, "step 1 of team-a/llama is unpinned\n")
    assert pinned(run) == set()


def test_unpin_of_what_has_no_pin_is_refused(run: Path, call: Any) -> None:
    answer = call("unpin", 1, "--run-folder", run)
    assert (answer.code, answer.err) == (1, f"step 1 has no pin in {run}\n")


def test_pin_json_has_the_documented_shape(run: Path, call: Any) -> None:
    answer = call("pin", 1, "--run-folder", run, "--json")
    assert json.loads(answer.out) == {
        "run": "team-a/llama",
        "step": 1,
        "attempt": "0000000000000001",
        "done": "pinned",
        "back_from_trash": False,
    }


@pytest.mark.parametrize("word", ["latest", "-1", "1.5", "step-1"])
@pytest.mark.parametrize("verb", ["pin", "unpin", "rm"])
def test_pin_and_rm_of_what_names_no_step_are_wrong_usage(
    run: Path, call: Any, verb: str, word: str
) -> None:
    answer = call(verb, "--run-folder", run, "--", word)
    assert answer.code == 2
    said = " ".join(answer.err.split())
    assert f"'{word}': allowed is a step's number, or the name of its folder" in said
    assert pinned(run) == set()


def test_pin_of_a_step_in_a_local_folder_says_what_is_durable(
    a_run: Any, a_step: Any, call: Any
) -> None:
    local = a_run("node0")
    a_step(local, 7, tier="local")
    answer = call("pin", 7, "--run-folder", local)
    want = f"step 7 is not durable in {local}: it has no COMMIT there; nothing is durable there\n"
    assert (answer.code, answer.err) == (1, want)
