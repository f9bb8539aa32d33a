"""Moments of an optimizer: all of a checkpoint's come back, or a name is told."""

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
    program = a_program(torch.optim.SGD, momentum=0.9)
    with pytest.raises(Reject, match=r"optim\.state\.[ab]\.\w+\.momentum_buffer"):
        restore(site, program)


def test_c019_optimizer_that_cannot_take_a_moment_is_refused_and_the_parameter_named(site):
    program = a_program(torch.optim.AdamW)
    program["model"]["a"](torch.ones(1, 3)).sum().backward()
    program["optim"].step()
    with pytest.raises(Reject, match=r"optim\.state\.b\.bias: .* restore before"):
        restore(site, program)


def test_parameter_that_is_frozen_now_needs_no_moment(site):
    program = a_program(torch.optim.AdamW)
    program["model"]["b"].requires_grad_(False)
    restore(site, program)
    assert list(program["optim"].state_dict()["state"]) == [0, 1]
