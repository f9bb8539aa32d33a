import json
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_sidecar.lock import FlushLock

OTHER_RUN_ID = "0c0a5f0e-0000-4000-8000-000000000000"


@pytest.fixture
def local(a_run: Any, a_step: Any) -> Path:
    """A node's folder with two sealed steps."""
    path: Path = a_run("node0")
    a_step(path, 1, tier="local")
    a_step(path, 2, tier="local")
    return path


def test_flush_makes_the_newest_durable_and_says_so(local: Path, tmp_path: Path, call: Any) -> None:
    answer = call("flush", "--once", "--local", local, "--remote", tmp_path / "new/team-a/llama")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "step 2: durable\nstep 1: superseded by step 2\n"


def test_flush_damaged_file_is_named_and_not_well(local: Path, tmp_path: Path, call: Any) -> None:
    damaged = next(local.glob("step-*2.*")) / "weights-0.distcp"
    damaged.write_bytes(b"x" * 10_000)
    answer = call("flush", "--once", "--local", local, "--remote", tmp_path / "pfs", "--json")
    assert answer.code == 1
    assert json.loads(answer.out)["whole"] is False
    assert "weights-0.distcp: its bytes are not those that were sealed" in answer.err
    assert "{" not in answer.err, "sentences, not log records"


def test_flush_while_another_flushes_is_refused(local: Path, tmp_path: Path, call: Any) -> None:
    with Folder.open(local) as run:
        lock = FlushLock(run)
        assert lock.try_take()
        answer = call("flush", "--once", "--local", local, "--remote", tmp_path / "pfs")
        lock.release()
    assert (answer.code, answer.out) == (1, "")
    assert "another process flushes this folder" in answer.err


def test_flush_onto_another_run_is_not_well(local: Path, a_run: Any, call: Any) -> None:
    other = a_run("other", run_id=OTHER_RUN_ID, run="team-a/llama")
    answer = call("flush", "--once", "--local", local, "--remote", other)
    assert answer.code == 1
    assert f"belongs to run {OTHER_RUN_ID}" in answer.out


def test_flush_of_an_empty_run_has_nothing_to_do(a_run: Any, tmp_path: Path, call: Any) -> None:
    answer = call("flush", "--once", "--local", a_run("node0"), "--remote", tmp_path / "pfs")
    assert (answer.code, answer.out) == (0, "nothing is sealed here\n")


@pytest.mark.parametrize(
    ("words", "code", "want"),
    [
        (("--local", "a", "--remote", "b"), 2, "add --once"),
        (("--once", "--local", "a"), 2, "--remote"),
        (("--once", "--local", "none", "--remote", "b"), 1, "none: No such file or directory"),
    ],
    ids=["for ever", "one tier", "missing"],
)
def test_flush_wrong_words_are_a_sentence(
    call: Any, words: tuple[str, ...], code: int, want: str
) -> None:
    answer = call("flush", *words)
    assert answer.code == code
    assert want in answer.err
