"""Tied weights: two names of one tensor, through a save and a restore."""

import pytest
import torch
from rank_files import LoneRank, alone_in, remote_root, run_folder, save_alone

import tidegate
from tidegate.reading import find_tied
from tidegate.restore import Restore
from tidegate.site import open_site
from tidegate.staging import Slot
from tidegate.state import TrainingState
from tidegate_contract.errors import Reject
from tidegate_contract.layout import Attempt


class Tied(torch.nn.Module):
    """An output head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.mid = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight


def build(seed: int) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Tied, optim: torch.optim.Optimizer) -> None:
    model.head(model.mid(model.embed(torch.arange(32)))).square().mean().backward()
    optim.step()
    optim.zero_grad()


def as_lists(model: Tied, optim: torch.optim.Optimizer) -> str:
    return str([[p.tolist() for p in model.parameters()], optim.state_dict()])


@pytest.mark.parametrize("has_begun", [False, True], ids=["fresh program", "program that trained"])
def test_c014_tied_weights_come_back_tied_and_train_on_alike(tmp_path, has_begun):
    model, optim = build(0)
    for _ in range(3):
        train(model, optim)
    remote_root(tmp_path)
    site = open_site(alone_in(tmp_path), LoneRank())
    attempt = Attempt(step=3, nonce="0000000000000003")
    save_alone(site, attempt, {"model": model, "optim": optim})
    again, fresh = build(5)
    if has_begun:
        train(again, fresh)

    state = {"model": again, "optim": fresh}
    taken = TrainingState(state, None, rank=0, keeps_rng=False, on_world_change=None)
    Restore(site, LoneRank(), taken).run()

    assert again.head.weight is again.embed.weight
    assert as_lists(again, fresh) == as_lists(model, optim)
    train(model, optim)
    train(again, fresh)
    assert as_lists(again, fresh) == as_lists(model, optim)
    with torch.no_grad():
        again.head.weight.zero_()
    assert not again.embed.weight.any()


def test_c014_snapshot_holds_tied_weights_once():
    model, optim = build(0)
    train(model, optim)
    state = {"model": model, "optim": optim}
    taken = TrainingState(state, None, rank=0, keeps_rng=False, on_world_change=None)
    found = Slot().copy(taken.capture())
    weights = found["model"]
    assert weights["embed.weight"].data_ptr() == weights["head.weight"].data_ptr()
    assert weights["embed.weight"].data_ptr() != model.embed.weight.data_ptr()
    assert list(found["optim"]["state"]) == ["embed.weight", "mid.weight", "mid.bias"]


def a_run_of(tmp_path, model: Tied):
    remote_root(tmp_path)
    site = open_site(alone_in(tmp_path), LoneRank())
    save_alone(site, Attempt(step=3, nonce="0000000000000003"), {"model": model})
    return site


def untie(model: Tied, number: float) -> Tied:
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
    with torch.no_grad():
        model.head.weight[-1, -1] = number
    return model


def load_into(model: Tied, site, tmp_path, how: str) -> None:
    if how == "load":
        tidegate.load(run_folder(tmp_path / "node"), {"model": model})
        return
    taken = TrainingState({"model": model}, None, rank=0, keeps_rng=False, on_world_change=None)
    Restore(site, LoneRank(), taken).run()


@pytest.mark.parametrize("how", ["load", "restore"])
def test_c014_two_tensors_that_differ_are_refused_for_a_tied_model(tmp_path, how):
    site = a_run_of(tmp_path, untie(build(0)[0], 9.0))
    again = build(5)[0]
    before = [p.tolist() for p in again.parameters()]
    with pytest.raises(
        Reject, match=r"model\.head\.weight and model\.embed\.weight are one"
    ) as told:
        load_into(again, site, tmp_path, how)
    assert "differ" in str(told.value)
    assert [p.tolist() for p in again.parameters()] == before, "nothing was written"


@pytest.mark.parametrize("how", ["load", "restore"])
def test_c014_two_tensors_that_are_equal_fill_a_tied_model(tmp_path, how):
    model = untie(build(0)[0], float("nan"))
    with torch.no_grad():
        model.embed.weight[-1, -1] = float("nan")
    site = a_run_of(tmp_path, model)
    again = build(5)[0]
    load_into(again, site, tmp_path, how)
    assert str(again.embed.weight.tolist()) == str(model.embed.weight.tolist())
    assert again.head.weight is again.embed.weight


def test_tensors_without_memory_are_not_held_for_tied():
    empty, dummy = torch.empty(0), torch.empty(2, device="meta")
    target = {"a": empty, "b": empty.clone(), "c": dummy, "d": torch.empty_like(dummy)}
    assert find_tied(target) == []


def test_views_of_one_tensor_are_tied_only_where_they_are_the_same_place():
    whole = torch.ones(4, 4)
    target = {"a": whole, "b": whole[1:], "c": whole.T, "d": {"e": whole.detach()}}
    assert [pair[:2] for pair in find_tied(target)] == [("a", "d.e")]
