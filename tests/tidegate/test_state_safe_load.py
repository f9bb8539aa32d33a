"""What a safe loader would refuse is told at the first save; what cannot be saved is named."""

import argparse
import collections
import enum
import io
import logging
import sys
from typing import Any

import numpy as np
import pytest
import torch
from rank_files import LoneRank, alone_in, remote_root, save_alone

from tidegate import safe_load, saves
from tidegate.planner import NodePlanner
from tidegate.ranks import Topology
from tidegate.rng import put_rng, take_rng
from tidegate.safe_load import find_unsafe, warn_of_unsafe
from tidegate.saves import Saves, Stage
from tidegate.site import open_site
from tidegate.writer import Desk, Ticket
from tidegate_contract.layout import Attempt, Part
from tidegate_contract.seal import SaveReason

ALONE = Topology(nodes=(frozenset({0}),))


class Color(enum.Enum):
    RED = 1


class ConfigList(list):
    pass


class Scaler:
    def __init__(self) -> None:
        self.scale = 2.0


class Unwilling:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


VALUES = {
    "numpy scalar": np.float32(1),
    "array": np.ones(3),
    "namespace": argparse.Namespace(lr=0.1),
    "enum": Color.RED,
    "config list": ConfigList([1]),
    "scaler": Scaler(),
    "class": Scaler,
    "function": warn_of_unsafe,
    "deep inside": {"a": [{"b": (1, Color.RED)}]},
    "deque": collections.deque([1]),
    "set": {1, 2},
    "frozen set": frozenset([1]),
    "long bytes": b"x" * 10_000,
    "long text": "x" * 10_000,
    "dtype": torch.float32,
    "size": torch.Size([2]),
    "counter": collections.Counter("ab"),
    "tensors": {1: torch.ones(2), 2: torch.nn.Parameter(torch.ones(2))},
    "numbers": (1, 2.0, 3j, 10**400, None, True),
}


def is_refused(value: Any) -> bool:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001  # whatever the loader says, it did not load
        return True
    return False


@pytest.mark.parametrize("name", VALUES)
def test_c015_entry_is_named_exactly_if_the_safe_loader_refuses_it(name):
    entries = {"box": {"value": (VALUES[name],)}, "other": (1, 2)}
    found = find_unsafe(entries)
    assert list(found.refused) == (["box.value"] if is_refused((VALUES[name],)) else [])


def test_c015_types_are_named_once_with_their_entries(caplog):
    entries: dict[str, Any] = {f"e{index:02}": Scaler() for index in range(13)}
    entries |= {"args": argparse.Namespace(), "bad": Unwilling(), "ok": {"lr": 1.0}}
    warn_of_unsafe({"state": entries})
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING
    assert f"would refuse state.e00 ({__name__}.Scaler)" in text
    assert "state.e09 " in text
    assert "state.e10 " not in text
    assert "and 5 more;" in text
    assert find_unsafe({"state": entries}).refused["state.bad"] == "cannot be pickled: not me"


def test_c015_nothing_is_said_of_plain_state_and_of_the_generators(caplog):
    warn_of_unsafe({"rank": {"0": {"rng": (take_rng(),)}}, "model": {"w": torch.ones(2)}})
    assert not caplog.records


def test_look_stops_after_so_many_objects_and_touches_no_data(monkeypatch):
    assert "a" in find_unsafe({"a": [*range(50), Color.RED]}).refused
    found = find_unsafe({"a": [*range(50), Color.RED], "b": Color.RED}, most_of_entry=40)
    assert list(found.refused) == ["b"], "an entry has a bound of its own"
    assert found.unfinished == ("a",)
    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", lambda *_: sys.exit("touched"))
    plain = find_unsafe({"a": (torch.ones(2), {1: torch.ones(2)}), "b": torch.ones(2)})
    assert not plain.refused
    assert not plain.unfinished


def test_look_at_all_entries_has_a_bound_too():
    found = find_unsafe({"a": [*range(50)], "b": [*range(50)], "c": Color.RED}, most_in_all=70)
    assert not found.refused
    assert found.unfinished == ("b", "c")


def test_entry_that_is_not_looked_at_to_its_end_is_named_in_the_warning(monkeypatch, caplog):
    monkeypatch.setattr(safe_load, "_MOST_OF_ENTRY", 40)
    warn_of_unsafe({"history": [(i,) for i in range(50)], "args": argparse.Namespace()})
    (text,) = [record.getMessage() for record in caplog.records]
    assert "would refuse args (argparse.Namespace)" in text
    assert "not known of history" in text


class Panic(BaseException):
    """What a library in another language may raise."""


class Panicking:
    def __reduce__(self) -> Any:
        raise Panic("unwrapped nothing")


def test_report_lets_nothing_out_that_pickling_raises(caplog):
    warn_of_unsafe({"tok": (Panicking(),), "args": argparse.Namespace()})
    (text,) = [record.getMessage() for record in caplog.records]
    assert "tok (cannot be pickled: unwrapped nothing), args (" in text


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_report_lets_out_what_ends_the_program(monkeypatch, kind):
    def end(_: Any) -> Any:
        raise kind

    monkeypatch.setattr(Panicking, "__reduce__", end)
    with pytest.raises(kind):
        warn_of_unsafe({"tok": (Panicking(),)})


def test_generators_saved_by_an_earlier_version_go_on_where_they_were():
    taken = {**take_rng(), "numpy": np.random.get_state()}
    want = np.random.rand()
    put_rng(taken)
    assert np.random.rand() == want


@pytest.mark.parametrize("rank", [0, 1])
def test_c015_only_the_first_save_of_rank_0_is_looked_at(monkeypatch, caplog, rank):
    monkeypatch.setattr(saves, "write_attempt", lambda *_: 1)
    desk = Desk(run_folder="", run_id="", rank=rank, topology=ALONE, part_of=lambda _: Part.REST)
    flight = Saves(desk, None, slots=1, timeout_seconds=10)
    for step in (1, 2):
        attempt = Attempt(step=step, nonce="0000000000000001")
        ticket = Ticket(attempt=attempt, tokens=0, lineage=1, reason=SaveReason.CADENCE)
        assert flight.wait_free_slot()
        flight.begin(ticket, lambda: {"args": (argparse.Namespace(),)})
        flight.wait_oldest()
        assert flight.settle().stage is Stage.SEALED
    flight.stop()
    assert [r.name for r in caplog.records] == ["tidegate.safe_load"] * (rank == 0)


def save_with_bound(tmp_path, value: Any, most_pickled_bytes: int) -> None:
    remote_root(tmp_path)
    site = open_site(alone_in(tmp_path), LoneRank())
    planner = NodePlanner(site.topology, most_pickled_bytes=most_pickled_bytes)
    attempt = Attempt(step=1, nonce="0000000000000001")
    save_alone(site, attempt, {"small": torch.ones(2), "box": value}, planner=planner)


@pytest.mark.parametrize("value", [b"x" * 5000, np.ones(700)], ids=["bytes", "array"])
def test_c009_object_above_the_bound_fails_the_save_and_is_named(tmp_path, value):
    with pytest.raises(BaseException, match=r"state entry 'box', a \w+, has \d{4} bytes") as caught:
        save_with_bound(tmp_path, value, 4000)
    assert "allowed are 4000" in str(caught.value)
    assert not list(tmp_path.rglob("seal-*.json"))


def test_c009_tensors_inside_an_object_do_not_count(tmp_path):
    save_with_bound(tmp_path, {1: torch.ones(5000)}, 4000)
    assert list(tmp_path.rglob("seal-0.json"))


def test_c009_object_that_cannot_be_pickled_is_named(tmp_path):
    with pytest.raises(BaseException, match="state entry 'box', a function, cannot be saved"):
        save_with_bound(tmp_path, lambda: 1, 4000)
