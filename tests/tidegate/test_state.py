"""User's objects as entries of a checkpoint, and back: without ranks, without files."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from tidegate.rng import put_rng, take_rng
from tidegate.state import TrainingState
from tidegate_contract.errors import Reject
from tidegate_contract.layout import Part


def a_state(state, rank_state=None, rank=0, **options) -> TrainingState:
    rule = {"keeps_rng": False, "on_world_change": None, **options}
    return TrainingState(state, rank_state, rank=rank, **rule)


def saved(*entries) -> tuple[Metadata, dict]:
    """Metadata and flat values as a save of these entries of several ranks leaves them."""
    values, paths = {}, {}
    for ranks_entries in entries:
        flat, found = flatten_state_dict(ranks_entries)
        values |= flat
        paths |= found
    described = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=value.dtype), size=value.size(), chunks=[]
        )
        if isinstance(value, torch.Tensor)
        else BytesStorageMetadata()
        for name, value in values.items()
    }
    return Metadata(state_dict_metadata=described, planner_data=paths), values


def restore(state: TrainingState, *entries, saved_world: int = 1, world_size: int = 1) -> None:
    """A load without files: every value of the target is taken from the saved ones."""
    metadata, values = saved(*entries)
    target = state.build_target(metadata, is_same_world=saved_world == world_size)
    flat, paths = flatten_state_dict(target)
    for name, place in paths.items():
        if isinstance(flat[name], torch.Tensor):
            flat[name].copy_(values[name])
        else:
            put(target, place, values[name])
    state.apply(target, saved_world=saved_world, world_size=world_size)


def put(container, path, value) -> None:
    for part in path[:-1]:
        container = container[part]
    container[path[-1]] = value


class Box:
    """Stateful with whatever state."""

    def __init__(self, content) -> None:
        self.content = content

    def state_dict(self):
        return self.content

    def load_state_dict(self, found) -> None:
        self.content = found


@pytest.mark.parametrize(
    "content",
    [
        {"a": 1, "b": {"c": [1, 2], "d": None}},
        {"milestones": Counter({3: 1, 9: 2})},
        {},
        {"a": {}},
        {1: "x"},
        {"a.b": 1, "a": {"b": 2}},
        (1, 2),
        [],
        {"ema": {"w": torch.arange(3.0)}},
        {"history": [{"loss": 1.0}, {}]},
        7,
    ],
    ids=[
        *("nested", "integer keys in a Counter", "empty", "empty inside", "integer keys"),
        *("keys that clash when flat", "tuple", "empty list", "tensors", "list of dicts", "number"),
    ],
)
def test_stateful_comes_back_as_it_was(content):
    before = a_state({"box": Box(content)}).capture()
    after = Box("other")
    restore(a_state({"box": after}), before)
    assert str(after.content) == str(content) or after.content == content
    assert type(after.content) is type(content)


def test_plain_values_and_pairs_are_read_and_written():
    live = {"epoch": 3, "weight": torch.ones(2), "pair": (lambda: "got", lambda v: None)}
    entries = a_state(live).capture()
    assert entries["pair"] == "got"
    found = []
    again = {"epoch": 0, "weight": torch.zeros(2), "pair": (lambda: None, found.append)}
    held = again["weight"]
    restore(a_state(again), entries)
    assert again["epoch"] == 3
    assert held.tolist() == [1.0, 1.0], "read in place"
    assert found == ["got"]


def a_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def train(model, optim) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    optim.zero_grad()


def test_optimizer_that_has_not_begun_stays_so_through_save_and_restore():
    model = a_model()
    optim = torch.optim.AdamW(model.parameters())
    entries = a_state({"model": model, "optim": optim}).capture()
    assert not optim.state
    other = a_model()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    restore(a_state({"model": other, "optim": fresh}), entries)
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.001


def test_parameter_without_gradient_gets_no_optimizer_state():
    def build():
        model = a_model()
        model.register_parameter("spare", torch.nn.Parameter(torch.ones(1)))
        return model, torch.optim.AdamW(model.parameters())

    model, optim = build()
    train(model, optim)
    other, fresh = build()
    restore(
        a_state({"model": other, "optim": fresh}),
        a_state({"model": model, "optim": optim}).capture(),
    )
    assert other.spare not in fresh.state
    assert fresh.state[other.weight]["step"] == 1
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optim.state[model.weight]["exp_avg"])


def test_several_models_and_optimizers_keep_their_own_state():
    def build():
        first, second = a_model(), a_model()
        one = torch.optim.SGD(first.parameters(), momentum=0.9, lr=0.1)
        both = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.2)
        return {"gen": first, "disc": second, "sgd": one, "adam": both}

    live = build()
    for optim in (live["sgd"], live["adam"]):
        (live["gen"](torch.ones(1, 3)).sum() * live["disc"](torch.ones(1, 3)).sum()).backward()
        optim.step()
    again = build()
    restore(a_state(again), a_state(live).capture())
    for name in ("gen", "disc"):
        assert torch.equal(again[name].weight, live[name].weight)
    for name in ("sgd", "adam"):
        assert str(again[name].state_dict()) == str(live[name].state_dict())


def test_parts_follow_the_kind_of_the_object():
    model = a_model()
    state = a_state({"m": model, "o": torch.optim.SGD(model.parameters()), "x": 1})
    assert state.part_of("m.weight") is Part.WEIGHTS
    assert state.part_of("o.param_groups.0.lr") is Part.OPTIM
    assert state.part_of("x") is Part.REST
    assert state.part_of("rank.0.rng") is Part.REST


def test_rank_state_is_private_and_kept_by_rank():
    parts = [a_state({}, {"loader": Box({"at": r})}, rank=r).capture() for r in (0, 1)]
    box = Box(None)
    restore(a_state({}, {"loader": box}, rank=1), *parts, saved_world=2, world_size=2)
    assert box.content == {"at": 1}


def test_rule_for_another_number_of_ranks_sees_all_of_them():
    parts = [a_state({}, {"loader": Box(r)}, rank=r).capture() for r in (0, 1)]
    box = Box(None)
    rule = lambda name, found, rank, size: (name, found, rank, size)  # noqa: E731
    state = a_state({}, {"loader": box}, on_world_change=rule)
    restore(state, *parts, saved_world=2, world_size=1)
    assert box.content == ("loader", {0: 0, 1: 1}, 0, 1)


@pytest.mark.parametrize(
    ("live", "word"),
    [
        ({"weight": torch.zeros(2, dtype=torch.float16)}, "float32"),
        ({"weight": torch.zeros(2), "new": 1}, "'new' is not in the checkpoint"),
    ],
    ids=["C011: another dtype", "a name that was not saved"],
)
def test_restore_into_a_program_that_does_not_fit_is_refused(live, word):
    metadata, _ = saved({"weight": torch.ones(2)})
    with pytest.raises(Reject, match=word):
        a_state(live).build_target(metadata, is_same_world=True)


@pytest.mark.parametrize(
    ("state", "rank_state", "word"),
    [
        ({"a.b": 1}, {}, "'a.b'"),
        ({"rank": 1}, {}, "'rank'"),
        ({}, {"rng": 1}, "kept by Tidegate"),
        ({"o": torch.optim.SGD([torch.zeros(1)])}, {}, "needs the model"),
    ],
    ids=["dot", "reserved", "generators", "optimizer alone"],
)
def test_state_that_cannot_be_saved_is_refused(state, rank_state, word):
    with pytest.raises(Reject, match=word):
        a_state(state, rank_state, keeps_rng=True)


def test_generators_go_on_where_they_were():
    taken = take_rng()
    want = (random.random(), float(np.random.rand()), torch.rand(1).item())
    put_rng(taken)
    assert (random.random(), float(np.random.rand()), torch.rand(1).item()) == want
