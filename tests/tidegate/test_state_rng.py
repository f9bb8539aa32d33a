"""Every bit generator that NumPy has: saved, read by a safe loader, and gone on with."""

import io
from typing import Any

import numpy as np
import pytest
import torch

from tidegate.rng import put_rng, take_rng
from tidegate.safe_load import warn_of_unsafe
from tidegate.staging import Slot

KINDS = [np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def bits(request):
    """The program's NumPy draws from it, and is amid a pair of normals and of halves."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(request.param(7))
    np.random.standard_normal()
    np.random.randint(0, 100, dtype=np.int32)
    yield np.random.get_bit_generator()
    np.random.set_bit_generator(before)


def draw() -> list[Any]:
    halves = np.random.randint(0, 1 << 30, 3, dtype=np.int32).tolist()
    return [np.random.standard_normal(), *halves, *np.random.rand(700).tolist()]


def is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return list(left) == list(right) and all(is_equal(left[k], right[k]) for k in left)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and left == right


def through_a_safe_loader(taken: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(Slot().copy({"rng": (taken,)}), file)
    file.seek(0)
    return torch.load(file, weights_only=True)["rng"][0]


def test_numpy_goes_on_where_it_was_whatever_its_bit_generator(bits, caplog):
    want_state = np.random.get_state(legacy=False)
    taken = through_a_safe_loader(take_rng())
    warn_of_unsafe({"rng": (taken,)})
    assert not caplog.records
    want = draw()
    put_rng(taken)
    assert is_equal(np.random.get_state(legacy=False), want_state)
    assert draw() == want


def test_state_saved_as_numpy_gives_it_goes_on_where_it_was(bits):
    taken = {**take_rng(), "numpy": np.random.get_state(legacy=False)}
    want = draw()
    put_rng(taken)
    assert draw() == want


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.Philox], indirect=True)
def test_state_saved_with_its_key_as_whole_numbers_goes_on_where_it_was(bits):
    state = np.random.get_state(legacy=False)
    key = torch.from_numpy(state["state"]["key"].astype(np.int64))
    taken = {**take_rng(), "numpy": {**state, "state": {**state["state"], "key": key}}}
    want = draw()
    put_rng(taken)
    assert draw() == want
