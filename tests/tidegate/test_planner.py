"""Replicas: every node holds what its ranks read."""

from types import SimpleNamespace

import pytest

from tidegate.planner import build_node_plans
from tidegate.ranks import build_topology


def items(names: str) -> list:
    return [SimpleNamespace(index=name) for name in names]


def test_topology_groups_ranks_by_root_id():
    topology = build_topology(["b", "a", "b", "a"])
    assert topology.nodes == (frozenset({0, 2}), frozenset({1, 3}))
    assert [topology.node_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [topology.is_first(rank) for rank in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("roots", "owned", "want"),
    [
        ("aa", ["xy", "z"], ["", ""]),
        ("ab", ["xy", "z"], ["z", "xy"]),
        ("aabb", ["x", "y", "z", ""], ["z", "", "xy", ""]),
    ],
    ids=["one node", "two nodes", "two ranks each: the first fills the gaps"],
)
def test_replicas_are_what_the_node_lacks(roots, owned, want):
    wanted = [items("xyz")] * len(roots)
    plans = build_node_plans(wanted, [items(names) for names in owned], build_topology(roots))
    assert ["".join(item.index for item in plan.replicas) for plan in plans] == want


def test_replica_of_a_private_item_is_never_made():
    wanted = [items("xp"), items("xq")]
    plans = build_node_plans(wanted, [items("xp"), items("q")], build_topology("ab"))
    assert [[i.index for i in plan.replicas] for plan in plans] == [[], ["x"]]
