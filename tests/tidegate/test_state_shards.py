"""Shards that do not fit evenly, saved by one number of ranks and restored by another."""

import shutil

import pytest
from rank_files import sealed_steps

pytestmark = [pytest.mark.torch_ranks, pytest.mark.long]


@pytest.fixture(scope="module")
def saved_by_four(gang, tmp_path_factory):
    """A node with one step of four ranks; the last of them has no piece of some tensors."""
    node = tmp_path_factory.mktemp("node")
    ends = gang.run("keep_pieces", [{"local": str(node), "is_restored": False}] * 4)
    assert [end.code for end in ends] == [0] * 4
    assert [end.result["held"] for end in ends] == [2, 2, 2, 0]
    assert len(sealed_steps(node)) == 1
    return node, ends[0].result["values"]


@pytest.mark.parametrize("ranks", [4, 3, 2, 1])
def test_c010_tensors_with_empty_shards_come_back_whole(gang, saved_by_four, tmp_path, ranks):
    saved, want = saved_by_four
    node = shutil.copytree(saved, tmp_path / "node")  # a restore is counted
    assert want["uneven"] == [[6], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
    assert want["none"] == [[0, 128], []]

    ends = gang.run("keep_pieces", [{"local": str(node), "is_restored": True}] * ranks)

    assert [end.code for end in ends] == [0] * ranks
    assert [(end.result["step"], end.result["values"]) for end in ends] == [(1, want)] * ranks


def test_c019_moments_after_4_2_and_3_ranks_are_those_of_one_process(gang, tmp_path):
    (alone,) = gang.run("train_shards", [{"local": str(tmp_path / "alone"), "steps": 9}])
    last = None
    for ranks, steps in ((4, 3), (2, 6), (3, 9)):
        node = {"local": str(tmp_path / "node"), "steps": steps}
        ends = gang.run("train_shards", [node] * ranks)
        assert [end.code for end in ends] == [0] * ranks
        for rank, end in enumerate(ends):
            assert (f"saved step {steps} " in end.output) == (rank == 0), "told once"
            assert "a safe loader" not in end.output
            assert end.result["start"] == steps - 3
            assert end.result["began"] == last, "bit by bit"
        last = ends[0].result["ended"]

    want = alone.result["ended"]
    assert last.keys() == want.keys()
    assert last.pop("tie") and want.pop("tie")
    assert {name.rsplit(".")[-1] for name in last} >= {"step", "exp_avg", "exp_avg_sq"}
    for name, (shape, values) in want.items():
        assert last[name] == [shape, pytest.approx(values, rel=1e-4, abs=1e-7)], name
