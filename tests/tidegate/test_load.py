"""Weights alone, outside the job: which step, what is read, and that nothing is ever written."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_files import (
    LoneRank,
    alone_in,
    commit_newest,
    flip_bit,
    give_away,
    make_nodes,
    remote_root,
    run_folder,
    save_alone,
)
from rank_loop import build_model
from torch.distributed.checkpoint.state_dict_loader import load as load_by_stock_torch

import tidegate
from tidegate import reading, storage
from tidegate.site import open_site
from tidegate_contract.digest import ContentHasher
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import COMMIT, Attempt
from tidegate_contract.publish import claim_lineage

STRANGER = 6666
BLOCK = 1 << 12


def attempt(step: int) -> Attempt:
    return Attempt(step=step, nonce=f"{step:016x}")


def filled(number: float) -> torch.nn.Linear:
    model = torch.nn.Linear(100, 50)
    for tensor in model.state_dict().values():
        tensor.fill_(number)
    return model


def values(module: torch.nn.Module) -> set[float]:
    return {x for tensor in module.state_dict().values() for x in tensor.flatten().tolist()}


def state_of(step: int) -> dict:
    model = filled(step)
    optim = torch.optim.AdamW(model.parameters())
    scale = torch.full((3,), float(step))  # in another file than the modules
    return {"model": model, "ema": filled(-step), "optim": optim, "scale": scale, "notes": [step]}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose node holds steps 5 and 10, in small blocks, and whose remote tier step 5."""
    monkeypatch.setattr(storage, "ContentHasher", lambda size=BLOCK: ContentHasher(size))
    pfs = remote_root(tmp_path)
    site = open_site(alone_in(tmp_path), LoneRank())
    older = save_alone(site, attempt(5), state_of(5))
    durable = commit_newest([tmp_path / "node"], pfs)
    newest = save_alone(site, attempt(10), state_of(10))
    return SimpleNamespace(
        near=run_folder(tmp_path / "node"),
        far=run_folder(pfs),
        older=older,
        newest=newest,
        durable=durable,
        run_id=site.identity.run_id,
    )


def listing(root: Path) -> dict[Path, tuple[int, int, int]]:
    found = {path: path.stat() for path in [root, *root.rglob("*")]}
    return {path: (s.st_ino, s.st_size, s.st_mtime_ns) for path, s in found.items()}


def loaded(folder: Path, **options: object) -> tuple[tidegate.Loaded, set[float]]:
    model = filled(0)
    return tidegate.load(folder, {"model": model}, **options), values(model)


def test_newest_step_of_a_node_is_loaded_without_a_process_group(run):
    assert not torch.distributed.is_initialized()
    result, got = loaded(run.near)
    assert (result.step, result.tokens, result.lineage, got) == (10, 100, 1, {10.0})
    assert result.folder == run.newest
    assert result.reason == "step 10 is the newest that can be loaded"


def test_newest_durable_step_of_the_remote_tier_is_loaded(run):
    result, got = loaded(run.far)
    assert (result.step, result.folder, got) == (5, run.durable, {5.0})


def test_only_blocks_of_what_is_named_are_read_and_nothing_is_written(run, tmp_path):
    for path in (run.newest / "optim-0.distcp", run.newest / "rest-0.distcp"):
        flip_bit(path)
    before = listing(tmp_path)

    result, got = loaded(run.near)

    assert got == {10.0}
    assert listing(tmp_path) == before
    weights = (run.newest / "weights-0.distcp").stat().st_size
    one = 4 * (100 * 50 + 50)
    assert one <= result.bytes_read < weights
    both = tidegate.load(run.near, {"model": filled(0), "ema": filled(0)})
    assert result.bytes_read < both.bytes_read


def test_plain_value_is_replaced_in_the_mapping(run):
    into = {"notes": None}
    tidegate.load(run.near, into)
    assert into == {"notes": [10]}


def test_step_that_a_restore_went_back_to_is_newer_than_what_it_left(run):
    claim = LineageClaim(
        run_id=run.run_id,
        number=2,
        restored=attempt(5),
        explicit=True,
        claimed_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    with Folder.open(run.near) as folder:
        claim_lineage(folder, claim)
    assert loaded(run.near)[1] == {5.0}
    assert loaded(run.near, step=10)[1] == {10.0}
    with Folder.open(run.near) as folder:
        claim_lineage(folder, replace(claim, number=3))
    (run.near / "lineages" / "3.json").write_text("{")
    assert "lineages/3.json is damaged" in loaded(run.near)[0].reason


def test_step_is_loaded_from_a_copy_of_its_folder_alone(run, tmp_path):
    for source, want in ((run.durable, 5.0), (run.newest, 10.0)):
        copy = tmp_path / f"copy of {want}"
        shutil.copytree(source, copy)
        result, got = loaded(copy)
        assert (result.folder, got) == (copy, {want})
    with pytest.raises(tidegate.Reject, match="step 5 is not there; newest others: 10"):
        loaded(copy, step=5)


def test_step_that_is_not_there_is_refused_with_those_that_are(run):
    with pytest.raises(tidegate.Reject, match=r"/lm: step 7 is not there; newest others: 10, 5$"):
        loaded(run.near, step=7)


def test_newest_step_that_is_not_durable_is_passed_over_and_told(run, tmp_path):
    newer = commit_newest([tmp_path / "node"], tmp_path / "pfs")
    (newer / COMMIT).unlink()
    result, got = loaded(run.far)
    assert (result.step, got) == (5, {5.0})
    assert result.reason.endswith("(step 10: it is not durable yet)")
    assert loaded(run.far, step=5)[0].reason == "step 5 was asked for"
    with pytest.raises(tidegate.Reject, match=r"step 10 cannot be read \(it is not durable yet\)"):
        loaded(run.far, step=10)


def test_damaged_block_is_an_error_and_the_file_stays_where_it_is(run, tmp_path):
    flip_bit(run.newest / "weights-0.distcp")
    before = listing(tmp_path)
    into = {"model": filled(0), "ema": filled(0)}
    with pytest.raises(tidegate.Corrupt, match=r"weights-0.distcp: block \d+ of \d+ is damaged"):
        tidegate.load(run.near, into)
    assert listing(tmp_path) == before
    assert values(into["model"]) <= {0.0, 10.0}
    assert loaded(run.near, step=5)[1] == {5.0}


@pytest.mark.parametrize("name", [".metadata", "weights-0.distcp"])
def test_strangers_file_is_refused_before_anything_is_changed_unless_he_is_named(
    run, monkeypatch, name
):
    give_away(monkeypatch, STRANGER, run.newest / name)
    into = {"model": filled(0), "scale": torch.zeros(3)}
    with pytest.raises(
        tidegate.Reject, match=rf"{name}: belongs to uid {STRANGER}, .* to tidegate\.load$"
    ):
        tidegate.load(run.near, into)
    assert values(into["model"]) | set(into["scale"].tolist()) == {0.0}
    assert loaded(run.near, trusted_uids=[STRANGER])[1] == {10.0}


def test_user_that_a_strangers_run_names_is_not_trusted(run, monkeypatch):
    give_away(monkeypatch, STRANGER, run.near / "run.json", run.newest)
    with pytest.raises(tidegate.Reject, match=f"belongs to uid {STRANGER}"):
        loaded(run.near)


def without(key: str) -> torch.nn.Module:
    model = filled(0)
    delattr(model, key)
    return model


def with_more() -> torch.nn.Module:
    model = filled(0)
    model.register_buffer("more", torch.zeros(1))
    return model


def digest(into: object) -> list[float]:
    named = into.values() if isinstance(into, dict) else []
    modules = [value for value in named if isinstance(value, torch.nn.Module)]
    tensors = [tensor for module in modules for tensor in module.state_dict().values()]
    return [tensor.double().sum().item() for tensor in tensors if not tensor.is_meta]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: {"model": filled(0).half()}, r"model\.weight: .*float32.*float16"),
        (
            lambda: {"model": torch.nn.Linear(100, 40)},
            r"model\.weight: the checkpoint has shape \(50, 100\), the program \(40, 100\)",
        ),
        (lambda: {"model": with_more()}, r"model\.more: the program has it, the checkpoint not"),
        (lambda: {"model": without("bias")}, r"model\.bias: the checkpoint has it, the program"),
        (lambda: {"net": filled(0)}, r"'net' is not in the checkpoint; it has \['ema', 'model'"),
        (lambda: {"model": filled(0).to("meta")}, r"model\.weight: .* meta device"),
        (lambda: {"notes": torch.zeros(3)}, r"notes"),
        (lambda: {"optim": torch.optim.SGD(filled(0).parameters())}, r"into\['optim'\]: an optim"),
        (lambda: {}, "into: allowed is a mapping"),
        (lambda: filled(0), "into: allowed is a mapping"),
    ],
    ids=["dtype", "shape", "more", "fewer", "name", "meta", "kind", "optimizer", "none", "module"],
)
def test_what_does_not_fit_is_refused_by_name(run, build: Callable[[], object], words):
    into = build()
    before = digest(into)
    with pytest.raises(tidegate.Reject, match=words):
        tidegate.load(run.near, into)
    assert digest(into) == before


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, r"/there: cannot be read \(No such file"),
        (lambda path: path.write_text(""), r"/there: cannot be read \(Not a directory"),
        (lambda path: path.mkdir(), r"/there: holds neither run\.json nor a step's seals"),
    ],
    ids=["missing", "a file", "another folder"],
)
def test_folder_that_is_no_runs_is_refused_with_one_sentence(tmp_path, make, words):
    make(tmp_path / "there")
    with pytest.raises(tidegate.Reject, match=words):
        loaded(tmp_path / "there")


def test_run_that_saved_nothing_is_refused(tmp_path):
    remote_root(tmp_path)
    open_site(alone_in(tmp_path), LoneRank())
    with pytest.raises(tidegate.Reject, match=r"/lm: no step was ever saved$"):
        loaded(run_folder(tmp_path / "node"))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"step": "10"}, "step is '10'; allowed is"),
        ({"trusted_uids": ["me"]}, "trusted_uids holds 'me'"),
    ],
)
def test_argument_that_is_no_number_is_refused(run, option, words):
    with pytest.raises(tidegate.Reject, match=words):
        loaded(run.near, **option)


def test_metadata_that_an_older_torch_cannot_read_names_both_versions(run, monkeypatch):
    def fail(data: bytes) -> None:
        raise TypeError("too many values to unpack")

    monkeypatch.setattr(reading, "pickle", SimpleNamespace(loads=fail))
    want = rf"\.metadata: written by torch {torch.__version__}, .*too many values.* a newer one"
    with pytest.raises(tidegate.Reject, match=want.replace("+", r"\+")):
        loaded(run.near)


@pytest.mark.long
@pytest.mark.torch_ranks
def test_weights_that_two_ranks_saved_in_shards_are_loaded_as_stock_torch_loads_them(
    gang, tmp_path
):
    nodes, pfs = make_nodes(tmp_path, 2), remote_root(tmp_path)
    arguments = {"every": 1000, "steps": 3, "kind": "fsdp"}
    gang.run("train", [{"local": str(node), **arguments} for node in nodes])
    durable = commit_newest(nodes, pfs)
    want, got = build_model("plain"), build_model("plain")
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        load_by_stock_torch({"model": want.state_dict()}, checkpoint_id=durable)

    result = tidegate.load(run_folder(pfs), {"model": got})

    assert result.step == 3
    pairs = zip(want.state_dict().values(), got.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(got[0].weight, build_model("plain")[0].weight)
    with pytest.raises(tidegate.Reject, match="only the files of 1 of its 2 ranks are here"):
        tidegate.load(run_folder(nodes[1]), {"model": got})
