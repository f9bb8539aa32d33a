"""Moments of an optimizer: all of a checkpoint's come back, or a name is told."""

import logging

import pytest
import torch
from rank_files import LoneRank, alone_in, remote_root, save_alone

from tidegate.restore import Restore
from tidegate.site import open_site
from tidegate.state import TrainingState
from tidegate_contract.errors import Reject
from tidegate_contract.layout import Attempt


def a_program(kind: type[torch.optim.Optimizer], **options) -> dict:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(3, 2)})
    return {"model": model, "optim": kind(model.parameters(), lr=0.1, **options)}


@pytest.fixture
def site(tmp_path):
    """A run with one step of an AdamW that has moments of all parameters."""
    remote_root(tmp_path)
    found = open_site(alone_in(tmp_path), LoneRank())
    program = a_program(torch.optim.AdamW)
    for layer in program["model"].values():
        layer(torch.ones(1, 3)).sum().backward()
    program["optim"].step()
    save_alone(found, Attempt(step=1, nonce="0000000000000001"), program)
    return found


def restore(site, program: dict) -> None:
    taken = TrainingState(program, None, rank=0, keeps_rng=False, on_world_change=None)
    Restore(site, LoneRank(), taken).run()


def test_c019_program_with_gradients_before_its_restore_gets_all_moments(site):
    program = a_program(torch.optim.AdamW)
    weight = program["model"]["a"].weight
    program["model"]["a"](torch.ones(1, 3)).sum().backward()
    restore(site, program)
    state = program["optim"].state_dict()["state"]
    assert {index: entry["step"].item() for index, entry in state.items()} == dict.fromkeys(
        range(4), 1.0
    )
    assert state[0]["exp_avg"].any()
    assert weight.grad.tolist() == [[1.0] * 3] * 2, "left as it was"


def test_c019_checkpoint_without_a_moment_is_refused_and_the_moment_named(site):
    program = a_program(torch.optim.AdamW, amsgrad=True)
    with pytest.raises(Reject, match=r"optim\.state\.[ab]\.\w+\.max_exp_avg_sq"):
        restore(site, program)


def test_c019_optimizer_that_cannot_take_a_moment_is_refused_and_the_parameter_named(site):
    program = a_program(torch.optim.AdamW)
    program["model"]["a"](torch.ones(1, 3)).sum().backward()
    program["optim"].step()
    with pytest.raises(Reject, match=r"optim\.state\.b\.bias: .* restore before"):
        restore(site, program)


def test_parameter_that_is_frozen_now_needs_no_moment_and_is_named_in_one_warning(site, caplog):
    program = a_program(torch.optim.AdamW)
    program["model"]["b"].requires_grad_(False)
    restore(site, program)
    assert list(program["optim"].state_dict()["state"]) == [0, 1]
    (record,) = [r for r in caplog.records if r.name == "tidegate.state"]
    assert record.levelno == logging.WARNING
    assert "b.bias, b.weight" in record.getMessage()


def test_of_many_parameters_that_are_frozen_now_ten_are_named(tmp_path, caplog):
    remote_root(tmp_path)
    found = open_site(alone_in(tmp_path), LoneRank())
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(14)])
    program = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    sum(model).sum().backward()
    program["optim"].step()
    save_alone(found, Attempt(step=1, nonce="0000000000000001"), program)
    for parameter in model[1:]:
        parameter.requires_grad_(False)
    program["optim"] = torch.optim.AdamW(model.parameters())
    restore(found, program)
    (text,) = [r.getMessage() for r in caplog.records if r.name == "tidegate.state"]
    assert ": 1, 10, 11, 12, 13, 2, 3, 4, 5, 6 and 3 more;" in text


def test_moments_are_all_taken_without_a_warning_where_nothing_is_frozen(site, caplog):
    restore(site, a_program(torch.optim.AdamW))
    assert not [r for r in caplog.records if r.name == "tidegate.state"]


class Averaging(torch.optim.SGD):
    """Keeps an average of its own from the start; the momentum comes at the first step."""

    def __init__(self, parameters, **options) -> None:
        super().__init__(parameters, **options)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["average"] = parameter.detach().clone()


@pytest.mark.parametrize(
    ("saved", "now", "entry"),
    [
        (Averaging, Averaging, r"optim\.state\.a\.bias\.momentum_buffer: .* restore before"),
        (torch.optim.SGD, torch.optim.SGD, r"optim\.state\.a\.bias: .* keeps none"),
    ],
    ids=["part of the state made before", "built without momentum"],
)
def test_c019_moment_that_has_no_place_is_refused_and_named(tmp_path, saved, now, entry):
    remote_root(tmp_path)
    found = open_site(alone_in(tmp_path), LoneRank())
    program = a_program(saved, momentum=0.9)
    for layer in program["model"].values():
        layer(torch.ones(1, 3)).sum().backward()
    program["optim"].step()
    save_alone(found, Attempt(step=1, nonce="0000000000000001"), program)
    fresh = a_program(now, momentum=0.9 if now is Averaging else 0)
    with pytest.raises(Reject, match=entry):
        restore(found, fresh)
