"""Tied weights: two names of one tensor, through a save and a restore."""

import pytest
import torch
from rank_files import LoneRank, alone_in, remote_root, save_alone

from tidegate.restore import Restore
from tidegate.site import open_site
from tidegate.staging import Slot
from tidegate.state import TrainingState
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
