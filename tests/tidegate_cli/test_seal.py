import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate_cli.foreign import Sealing, draw_attempt, seal_folder
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import Attempt, step_folder
from tidegate_contract.run_documents import read_identity
from tidegate_contract.scan import scan_steps

CONTENTS = {"model.safetensors": os.urandom(70_000), "config.json": b"{}", "empty": b""}
OTHER_RUN_ID = "0c0a5f0e-0000-4000-8000-000000000000"
ATTEMPT = Attempt(step=7, nonce="00000000000000aa")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """What another framework wrote."""
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    for name, data in CONTENTS.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def seal(call: Any, made: Path, tmp_path: Path) -> Callable[..., Any]:
    """Seals `made` as step 7 into the run's folder `node0`."""

    def run(*words: object, step: int = 7, run: str = "team-a/bert", folder: Path = made) -> Any:
        local = tmp_path / "node0" / run
        return call("seal", folder, "--run", run, "--step", step, "--local", local, *words)

    return run


def test_seal_then_flush_gives_the_same_bytes_on_the_remote_tier(
    seal: Any, call: Any, tmp_path: Path
) -> None:
    local, remote = tmp_path / "node0/team-a/bert", tmp_path / "pfs/team-a/bert"
    (tmp_path / "pfs").mkdir()
    sealed = json.loads(seal("--tokens", 700, "--json").out)
    flushed = call("flush", "--once", "--local", local, "--remote", remote)
    assert (flushed.code, flushed.out) == (0, "step 7: durable\n")
    step = remote / Path(sealed["folder"]).name
    assert {name: (step / name).read_bytes() for name in CONTENTS} == CONTENTS
    verified = call("verify", remote)
    assert (verified.code, verified.out) == (0, "1 of 1 step is sound, 68.4 KiB read\n")
    (row,) = json.loads(call("ls", remote, "--local", local, "--json").out)["steps"]
    assert (row["state"], row["tokens"], row["ranks"]) == ("durable", 700, 1)
    assert json.loads((step / "manifest.json").read_bytes())["torch_version"] == ""


def test_seal_makes_a_user_named_run_and_says_what_to_run_next(seal: Any, tmp_path: Path) -> None:
    answer = seal()
    assert answer.code == 0
    with Folder.open(tmp_path / "node0/team-a/bert") as run:
        identity = read_identity(run)
        assert identity is not None
        (record,) = scan_steps(run, identity.run_id)
    assert (identity.name, identity.owner_uid, identity.uid) == ("team-a/bert", None, os.getuid())
    assert answer.out.splitlines() == [
        "step 7 of team-a/bert is sealed: 3 files, 68.4 KiB",
        str(tmp_path / "node0/team-a/bert" / record.folder),
        "make it durable:",
        f"  tidegate flush --once --local {tmp_path / 'node0/team-a/bert'} "
        "--remote REMOTE/team-a/bert",
    ]


def test_seal_the_same_step_again_is_a_newer_attempt(seal: Any, call: Any, tmp_path: Path) -> None:
    before = (first := json.loads(seal("--json").out)) and (
        tmp_path / "node0/team-a/bert/run.json"
    ).read_bytes()
    for _ in range(5):
        second = json.loads(seal("--json").out)
        assert second["attempt"] > first["attempt"], "the later one is the newer one"
        first = second
    assert (tmp_path / "node0/team-a/bert/run.json").read_bytes() == before
    rows = json.loads(call("ls", tmp_path / "node0/team-a/bert", "--json").out)["steps"]
    assert [row["state"] for row in rows] == ["sealed"] * 6
    assert rows[0]["attempt"] == first["attempt"]


def test_seal_takes_the_identity_of_the_remote_tier(seal: Any, a_run: Any, tmp_path: Path) -> None:
    remote = a_run("pfs/bert", run_id=OTHER_RUN_ID, run="team-a/bert")
    answer = seal("--remote", remote)
    assert answer.code == 0
    assert (tmp_path / "node0/team-a/bert/run.json").read_bytes() == (
        remote / "run.json"
    ).read_bytes()
    assert f"--remote {remote}\n" in answer.out


def test_seal_into_another_life_of_the_run_is_refused(seal: Any, a_run: Any) -> None:
    seal()
    answer = seal("--remote", a_run("pfs/bert", run_id=OTHER_RUN_ID, run="team-a/bert"))
    assert answer.code == 1
    assert "is not the run of this name in" in answer.err


def test_seal_earlier_step_says_that_a_newer_one_stays(seal: Any) -> None:
    seal(step=9)
    answer = seal()
    assert answer.code == 0
    assert answer.err == (
        "step 9 stays newer, so a flush leaves this one out; if training went back, "
        "seal it again with --lineage 2\n"
    )
    assert "durable" not in answer.out, "a flush would leave it out"
    assert seal("--lineage", 2).err == ""
    assert json.loads(seal("--json", step=8).out)["lineage"] == 2, "the highest known one"


def put_link(folder: Path) -> None:
    (folder / "latest").symlink_to("config.json")


def put_subfolder(folder: Path) -> None:
    (folder / "global_step7").mkdir()


def put_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def put_strange_name(folder: Path) -> None:
    (folder / "model [1].bin").write_bytes(b"")


def put_marker(folder: Path) -> None:
    (folder / "COMMIT").write_bytes(b"")


def put_receipt(folder: Path) -> None:
    (folder / "seal-0.json").write_bytes(b"")


def put_marker_in_another_case(folder: Path) -> None:
    (folder / "commit").write_bytes(b"")


def put_twin(folder: Path) -> None:
    (folder / "CONFIG.json").write_bytes(b"")


def take_everything(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "want"),
    [
        (put_link, "latest: a link; allowed is a flat folder of regular files"),
        (put_subfolder, "global_step7: a subfolder; allowed is a flat folder of regular files"),
        (put_pipe, "pipe: not a regular file; allowed is a flat folder of regular files"),
        (put_strange_name, "model [1].bin: this file name is not allowed; allowed are A-Z,"),
        (put_marker, "COMMIT: a name of Tidegate's own, so this folder is sealed already"),
        (put_receipt, "seal-0.json: a name of Tidegate's own, so this folder is sealed already"),
        (put_marker_in_another_case, "commit: a name of Tidegate's own"),
        (put_twin, "config.json: differs from CONFIG.json in case only"),
        (take_everything, "checkpoint-7: holds no files"),
    ],
    ids=[
        "C036: link",
        "subfolder",
        "pipe",
        "C057: name",
        "marker",
        "receipt",
        "marker in another case",
        "twin",
        "empty",
    ],
)
def test_seal_what_no_step_may_hold_is_refused_before_anything_is_made(
    seal: Any, made: Path, tmp_path: Path, spoil: Callable[[Path], None], want: str
) -> None:
    spoil(made)
    answer = seal()
    assert (answer.code, answer.out) == (1, "")
    assert want in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "node0").exists()


def test_seal_unreadable_file_is_refused_and_leaves_nothing(
    seal: Any, made: Path, as_stranger: Any, call: Any
) -> None:
    folder = as_stranger.folder / "out"
    made.rename(folder)
    folder.chmod(0o755)
    (folder / "config.json").chmod(0)
    local = as_stranger.folder / "node0/team-a/bert"
    local.mkdir(parents=True)
    local.chmod(0o777)
    with as_stranger():
        answer = seal("--local", local, folder=folder)
    assert answer.code == 1
    assert "config.json: Permission denied" in answer.err
    assert f"{folder}/config.json: Permission denied" in answer.err
    assert list(local.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "want"),
    [("NoSlash", "allowed is NAMESPACE/NAME"), ("../x", "allowed is NAMESPACE/NAME")],
    ids=["no namespace", "C035: parent"],
)
def test_seal_wrong_name_is_usage(seal: Any, name: str, want: str) -> None:
    answer = seal(run=name)
    assert answer.code == 2
    assert want in " ".join(answer.err.split())


def test_seal_into_another_run_is_refused(seal: Any, tmp_path: Path) -> None:
    seal()
    answer = seal("--local", tmp_path / "node0/team-a/bert", run="team-b/bert")
    assert answer.code == 1
    assert "run.json: is of run team-a/bert, not of team-b/bert" in answer.err


def test_seal_into_a_folder_of_something_else_is_refused(seal: Any, tmp_path: Path) -> None:
    local = tmp_path / "node0/team-a/bert"
    local.mkdir(parents=True)
    (local / "thesis.tex").write_bytes(b"")
    answer = seal()
    assert answer.code == 1
    assert "holds thesis.tex and no run.json, so it is no run's folder" in answer.err
    assert [path.name for path in local.iterdir()] == ["thesis.tex"]


def a_sealing(**changes: Any) -> Sealing:
    fields: dict[str, Any] = {
        "run_id": "r",
        "lineage": 1,
        "attempt": ATTEMPT,
        "tokens": 0,
        "now": datetime(2026, 11, 29, tzinfo=UTC),
        "shares_files": False,
    }
    return Sealing(**fields | changes)


def grow(made: Path) -> None:
    with (made / "config.json").open("ab") as file:
        file.write(b"more")


def rewrite(made: Path) -> None:
    (made / "config.json").write_bytes(b"[]")
    os.utime(made / "config.json", ns=(1, 1))


def replace(made: Path) -> None:
    (made / "new").write_bytes(b"{}")
    os.rename(made / "new", made / "config.json")


def add(made: Path) -> None:
    (made / "another").write_bytes(b"")


def remove(made: Path) -> None:
    (made / "model.safetensors").unlink()


@pytest.mark.parametrize("shares_files", [False, True], ids=["copied", "linked"])
@pytest.mark.parametrize("change", [grow, rewrite, replace, add, remove])
def test_seal_folder_that_changes_meanwhile_is_refused_and_leaves_nothing(
    made: Path, tmp_path: Path, change: Callable[[Path], None], shares_files: bool
) -> None:
    local = tmp_path / "node0"
    local.mkdir()
    changes = [change]

    def on_bytes(_: int) -> None:
        if changes:
            changes.pop()(made)

    sealing = a_sealing(shares_files=shares_files)
    with Folder.open(made) as source, Folder.open(local) as run:
        with pytest.raises(Reject, match="changed while it was read; nothing is sealed"):
            seal_folder(source, run, sealing, on_bytes)
    assert list(local.iterdir()) == []


def test_seal_links_share_the_files_and_copies_do_not(seal: Any, made: Path) -> None:
    for words, want in ((("--link",), True), ((), False)):
        folder = Path(json.loads(seal(*words, "--json").out)["folder"])
        for name in CONTENTS:
            assert (folder / name).samefile(made / name) is want
        assert sorted(os.listdir(folder)) == sorted([*CONTENTS, "seal-0.json"])


def test_seal_across_file_systems_copies(
    seal: Any, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **options: Any) -> None:
        if options.get("src_dir_fd") != options.get("dst_dir_fd"):
            raise OSError(18, "Invalid cross-device link")
        real(*_, **options)  # type: ignore[arg-type]

    real = os.link
    monkeypatch.setattr(os, "link", refuse)
    folder = Path(json.loads(seal("--link", "--json").out)["folder"])
    assert not (folder / "config.json").samefile(made / "config.json")
    assert (folder / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("shares_files", [False, True], ids=["copied", "linked"])
def test_seal_order_is_data_then_name_then_folder_then_seal(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares_files: bool
) -> None:
    calls: list[tuple[str, str]] = []
    for name in ("fsync", "fdatasync"):
        real_sync = getattr(os, name)

        def sync(fd: int, real: Callable[[int], None] = real_sync) -> None:
            calls.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
            real(fd)

        monkeypatch.setattr(os, name, sync)
    real_rename = os.rename

    def rename(source: str, target: str, **options: Any) -> None:
        calls.append(("rename", target))
        assert ("sync", source) in calls, f"{target} got its name before its bytes were safe"
        real_rename(source, target, **options)

    monkeypatch.setattr(os, "rename", rename)
    (tmp_path / "node0").mkdir()
    with Folder.open(made) as source, Folder.open(tmp_path / "node0") as run:
        folder = seal_folder(source, run, a_sealing(shares_files=shares_files), lambda _: None)
    renames = [target for call, target in calls if call == "rename"]
    assert renames == [*sorted(CONTENTS), "seal-0.json"]
    last_file = calls.index(("rename", renames[-2]))
    assert ("sync", folder) in calls[last_file : calls.index(("rename", "seal-0.json"))]
    assert calls[0] == ("sync", "node0"), "the new folder's own name"
    assert calls[-1] == ("sync", folder)


def test_draw_attempt_is_above_all_of_its_step_and_lineage() -> None:
    high = Attempt(step=7, nonce="fffffffffffffffe")
    assert draw_attempt(7, 1, [(high, 1)]).nonce == "f" * 16
    with pytest.raises(Reject, match="raise --lineage"):
        draw_attempt(7, 1, [(Attempt(step=7, nonce="f" * 16), 1)])
    assert step_folder(draw_attempt(7, 2, [(high, 1)])).startswith("step-00000000000000000007.")
