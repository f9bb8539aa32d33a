"""What `docs/cli.md` says of `--json` is what the command prints."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def documented(verb: str) -> Any:
    section = DOCS.split(f"\n## tidegate {verb}\n")[1].split("\n## ")[0]
    found = re.search(r"```json\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def shape(value: Any) -> Any:
    """Keys of objects and kinds of values; of a list its first item's."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


@pytest.fixture
def run(a_run: Any, a_step: Any) -> Path:
    """As in the examples: 900 and 1000 durable, 1200 with a local copy, 1300 on its way."""
    remote: Path = a_run()
    for step in (900, 1000, 1200):
        a_step(remote, step, ranks=range(4), world_size=4)
    a_step(remote, 1300, ranks=(0, 1), coming=(2, 3), world_size=4, tier="open")
    a_step(a_run("node0"), 1200, ranks=(0, 1), world_size=4, tier="local")
    return remote


def answer_of(call: Any, *words: object) -> Any:
    answer = call(*words, "--json")
    assert answer.code == 0
    return json.loads(answer.out)


def test_docs_of_ls_have_the_shape_that_it_prints(run: Path, call: Any) -> None:
    call("pin", 1000, "--run-folder", run)
    found = answer_of(call, "ls", run, "--local", run.parent / "node0")
    found["steps"] = [row for row in found["steps"] if row["step"] == 1000]
    assert shape(found) == shape(documented("ls"))


def test_docs_of_restore_point_have_the_shape_that_it_prints(run: Path, call: Any) -> None:
    local = run.parent / "node0"
    found = answer_of(call, "restore-point", "--remote", run, "--local", local)
    assert shape(found) == shape(documented("restore-point"))


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("verify", ("verify",)),
        ("pin", ("pin", 1000, "--run-folder")),
        ("rm", ("rm", 900, "--yes", "--run-folder")),
    ],
    ids=["verify", "pin", "rm"],
)
def test_docs_of_a_verb_have_the_shape_that_it_prints(
    run: Path, call: Any, verb: str, words: tuple[object, ...]
) -> None:
    assert shape(answer_of(call, *words, run)) == shape(documented(verb))


def test_docs_of_seal_and_flush_have_the_shape_that_they_print(tmp_path: Path, call: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model").write_bytes(b"weights")
    (tmp_path / "pfs").mkdir()
    local = ("--local", tmp_path / "node0/team-a/bert")
    made = answer_of(call, "seal", tmp_path / "out", "--run", "team-a/bert", "--step", 1200, *local)
    assert shape(made) == shape(documented("seal"))
    done = answer_of(call, "flush", "--once", *local, "--remote", tmp_path / "pfs/team-a/bert")
    assert done == documented("flush")
