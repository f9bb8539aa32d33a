"""A refusal of `tidegate seal` leaves nothing behind, whatever it is about."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate_cli import foreign
from tidegate_contract.folder import Folder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """What another framework wrote."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model").write_bytes(b"weights")
    return tmp_path / "out"


def a_remote_of_another_name(made: Path, a_run: Any) -> tuple[object, ...]:
    remote = a_run("pfs/team-b/other", run="team-b/other")
    return ("--local", made.parent / "node0/team-a/bert", "--remote", remote)


def inside_the_source(made: Path, _a_run: Any) -> tuple[object, ...]:
    return ("--local", made / "team-a/bert")


def inside_the_source_by_a_link(made: Path, _a_run: Any) -> tuple[object, ...]:
    (made.parent / "link").symlink_to(made)
    return ("--local", made.parent / "link/team-a/bert")


def the_tiers_root(made: Path, _a_run: Any) -> tuple[object, ...]:
    return ("--local", made.parent / "node0")


@pytest.mark.parametrize(
    ("build", "want"),
    [
        (a_remote_of_another_name, "run.json: is of run team-b/other, not of team-a/bert"),
        (inside_the_source, "--local lies inside "),
        (inside_the_source_by_a_link, "--local lies inside "),
        (the_tiers_root, "does not end in team-a/bert: a run's folder is NAMESPACE/NAME below"),
    ],
    ids=["another name", "inside", "inside by a link", "the tier's root"],
)
def test_seal_checks_everything_before_it_writes(
    made: Path, a_run: Any, call: Any, build: Callable[[Path, Any], tuple[object, ...]], want: str
) -> None:
    words = build(made, a_run)
    before = sorted(made.parent.rglob("*"))
    answer = call("seal", made, "--run", "team-a/bert", "--step", 1, *words)
    assert (answer.code, answer.out) == (1, "")
    assert want in answer.err
    assert answer.err.count("\n") == 1
    assert sorted(made.parent.rglob("*")) == before


def test_seal_of_a_folder_that_changes_meanwhile_begins_no_run(
    made: Path, tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = foreign._take_file

    def grow(source: Folder, *rest: Any) -> Any:
        (made / "late").write_bytes(b"")
        return take(source, *rest)

    monkeypatch.setattr(foreign, "_take_file", grow)
    local = tmp_path / "node0/team-a/bert"
    answer = call("seal", made, "--run", "team-a/bert", "--step", 1, "--local", local)
    assert answer.code == 1
    assert "changed while it was read" in answer.err
    assert list(local.iterdir()) == []


def test_seal_into_an_existing_run_takes_any_path(made: Path, a_run: Any, call: Any) -> None:
    local = a_run("mounted", run="team-a/bert")
    words = ("--run", "team-a/bert", "--step", 1, "--local", local)
    assert call("seal", made, *words).code == 0, "in a pod the mount has a name of its own"
