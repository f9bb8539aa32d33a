import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.run_documents import read_identity
from tidegate_sidecar.lock import FlushLock

OTHER_RUN_ID = "0c0a5f0e-0000-4000-8000-000000000000"


@pytest.fixture
def local(a_run: Any, a_step: Any) -> Path:
    """A node's folder with two sealed steps."""
    path: Path = a_run("node0")
    a_step(path, 1, tier="local")
    a_step(path, 2, tier="local")
    return path


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """Where the run's folder belongs on a remote tier that is mounted."""
    (tmp_path / "pfs").mkdir()
    return tmp_path / "pfs/team-a/llama"


def test_flush_makes_the_newest_durable_and_says_so(local: Path, far: Path, call: Any) -> None:
    answer = call("flush", "--once", "--local", local, "--remote", far)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "step 2: durable\nstep 1: superseded by step 2\n"


def test_flush_damaged_file_is_named_and_not_well(local: Path, far: Path, call: Any) -> None:
    damaged = next(local.glob("step-*2.*")) / "weights-0.distcp"
    damaged.write_bytes(b"x" * 10_000)
    answer = call("flush", "--once", "--local", local, "--remote", far, "--json")
    assert answer.code == 1
    assert json.loads(answer.out)["whole"] is False
    assert "weights-0.distcp: its bytes are not those that were sealed" in answer.err
    assert "{" not in answer.err, "sentences, not log records"


def test_flush_while_another_flushes_is_refused(local: Path, far: Path, call: Any) -> None:
    with Folder.open(local) as run:
        lock = FlushLock(run)
        assert lock.try_take()
        answer = call("flush", "--once", "--local", local, "--remote", far)
        lock.release()
    assert (answer.code, answer.out) == (1, "")
    assert "another process flushes this folder" in answer.err


def test_flush_onto_another_run_is_not_well(local: Path, a_run: Any, call: Any) -> None:
    other = a_run("other", run_id=OTHER_RUN_ID, run="team-a/llama")
    answer = call("flush", "--once", "--local", local, "--remote", other)
    assert answer.code == 1
    assert f"belongs to run {OTHER_RUN_ID}" in answer.out


def test_flush_of_an_empty_run_has_nothing_to_do(a_run: Any, far: Path, call: Any) -> None:
    answer = call("flush", "--once", "--local", a_run("node0"), "--remote", far)
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


def the_same(local: Path) -> tuple[Path, Path]:
    return local, local


def the_same_by_a_link(local: Path) -> tuple[Path, Path]:
    (local.parent / "link").symlink_to(local.parent)
    return local, local.parent / "link" / local.name


def inside(local: Path) -> tuple[Path, Path]:
    return local, local / "team-a/llama"


def around(local: Path) -> tuple[Path, Path]:
    return local, local.parent


def a_missing_tier(local: Path) -> tuple[Path, Path]:
    return local, local.parent / "pfs/team-a/llama"


def the_tiers_root(local: Path) -> tuple[Path, Path]:
    return local, local.parent / "pfs"


@pytest.mark.parametrize(
    ("build", "want"),
    [
        (the_same, "--local and --remote are the same folder: "),
        (the_same_by_a_link, "--local and --remote are the same folder: "),
        (inside, "--remote lies inside --local: "),
        (around, "--local lies inside --remote: "),
        (a_missing_tier, "pfs does not exist: is the remote tier mounted?"),
        (the_tiers_root, "does not end in team-a/llama: a run's folder is NAMESPACE/NAME below"),
    ],
    ids=["the same", "the same by a link", "inside", "around", "not mounted", "the tier's root"],
)
def test_flush_to_a_place_that_is_no_remote_folder_of_the_run_is_refused_and_makes_nothing(
    local: Path, call: Any, build: Callable[[Path], tuple[Path, Path]], want: str
) -> None:
    near, remote = build(local)
    before = sorted(local.parent.rglob("*"))
    answer = call("flush", "--once", "--local", near, "--remote", remote)
    assert (answer.code, answer.out) == (1, "")
    assert want in answer.err
    assert answer.err.count("\n") == 1
    assert sorted(local.parent.rglob("*")) == before


@pytest.mark.parametrize("tier", ["committed", "open", "lineages"])
def test_flush_of_swapped_tiers_is_refused(
    local: Path, a_run: Any, a_step: Any, call: Any, tier: str
) -> None:
    far = a_run("pfs/team-a/llama")
    if tier == "lineages":
        (far / "lineages").mkdir()
    else:
        a_step(far, 1, tier=tier)
    answer = call("flush", "--once", "--local", far, "--remote", local)
    assert (answer.code, answer.out) == (1, "")
    assert "belongs to a remote tier: are --local and --remote swapped?" in answer.err


def test_flush_of_a_local_tier_that_a_trainer_without_remote_tier_wrote_goes_on(
    local: Path, far: Path, call: Any
) -> None:
    (local / "lineages").mkdir()
    (local / "state-0.json").write_bytes(b"{}")
    assert call("flush", "--once", "--local", local, "--remote", far).code == 0


def flip_bit(folder: Path) -> bytes:
    data = bytearray((folder / "run.json").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "run.json").write_bytes(data)
    return bytes(data)


def identity_in(folder: Path) -> tuple[str, str]:
    with Folder.open(folder) as run:
        found = read_identity(run)
    assert found is not None
    return found.run_id, found.name


@pytest.mark.parametrize("damaged", ["local", "remote"])
def test_flush_mends_a_damaged_identity_from_the_other_tier(
    local: Path, far: Path, call: Any, damaged: str
) -> None:
    want = identity_in(local)
    assert call("flush", "--once", "--local", local, "--remote", far).code == 0
    place = local if damaged == "local" else far
    bytes_found = flip_bit(place)
    answer = call("flush", "--once", "--local", local, "--remote", far)
    assert (answer.code, answer.out) == (0, "step 2: durable\nstep 1: superseded by step 2\n")
    assert identity_in(place) == want
    assert [path.read_bytes() for path in (place / "quarantine").iterdir()] == [bytes_found]


def test_flush_of_a_run_that_nothing_names_any_more_is_one_sentence(
    local: Path, far: Path, call: Any
) -> None:
    flip_bit(local)
    before = sorted(local.parent.rglob("*"))
    answer = call("flush", "--once", "--local", local, "--remote", far)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.count("\n") == 1
    assert f"{local}/run.json: " in answer.err
    assert sorted(local.parent.rglob("*")) == before


def test_flush_of_a_damaged_local_identity_of_swapped_tiers_is_refused(
    local: Path, a_run: Any, a_step: Any, call: Any
) -> None:
    far = a_run("pfs/team-a/llama")
    a_step(far, 1, tier="committed")
    flip_bit(far)
    answer = call("flush", "--once", "--local", far, "--remote", local)
    assert (answer.code, answer.out) == (1, "")
    assert "are --local and --remote swapped?" in answer.err
