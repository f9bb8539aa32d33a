"""The trainer with real ranks: what is saved, restored, agreed, and how it ends."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rank_files import (
    commit_newest,
    flip_bit,
    make_nodes,
    remote_root,
    run_folder,
    sealed_steps,
    state_of,
)
from torch.distributed.checkpoint.state_dict_loader import load

from tidegate_contract.layout import METADATA, QUARANTINE, step_folder
from tidegate_contract.seal import SaveReason
from tidegate_contract.wire import AnswerResult, Phase

pytestmark = [pytest.mark.torch_ranks, pytest.mark.long]


def losses(ends):
    return [end.result["losses"] for end in ends]


def codes(ends):
    return [end.code for end in ends]


def per_node(nodes: list[Path], ranks_each: int, **arguments) -> list[dict]:
    return [{"local": str(node), **arguments} for node in nodes for _ in range(ranks_each)]


@pytest.fixture(scope="session")
def uninterrupted(gang, tmp_path_factory):
    """Losses of 14 steps on two ranks that nothing disturbs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return losses(gang.run("train", per_node([folder], 2, steps=14, every=100)))


def test_c016_training_restored_after_a_crash_is_bit_equal(gang, tmp_path, uninterrupted):
    ranks = per_node([tmp_path], 2, every=4)
    ends = gang.run("train", [{**r, "steps": 14, "ends": {"crash": 10}} for r in ranks])
    assert codes(ends) == [9, 9]

    ends = gang.run("train", [{**r, "steps": 14} for r in ranks])

    assert codes(ends) == [0, 0]
    step, tokens, tier, _ = ends[0].result["start"]
    assert (step, tokens, tier) == (9, 9 * 30, "Local")
    want = [{s: loss for s, loss in rank.items() if int(s) > 9} for rank in uninterrupted]
    assert losses(ends) == want
    assert [end.result["cursor"] for end in ends] == [14, 14]
    assert ends[0].result["lineage"] == 2


def test_c012_state_changed_right_after_step_is_saved_as_it_was(gang, tmp_path):
    ends = gang.run("mutate", per_node([tmp_path], 2, steps=6))

    assert codes(ends) == [0, 0]
    records = sealed_steps(tmp_path)
    assert [record.attempt.step for record in records] == [2, 4, 6]
    for record in records:
        want = ends[0].result[str(record.attempt.step)]
        assert digest_of(run_folder(tmp_path) / record.folder) == want


def digest_of(folder: Path) -> str:
    """As `rank_loop.Loop.digest`, of the weights that stock DCP reads from a folder."""
    import rank_loop

    loop = rank_loop.Loop("plain", 0)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load({"model": loop.model.state_dict()}, checkpoint_id=folder)
    return loop.digest()


@pytest.mark.parametrize(
    ("kind", "ranks_each"), [("fsdp", 1), ("ddp", 2)], ids=["fsdp on 2x1", "ddp on 2x2"]
)
def test_nodes_restore_from_their_own_disks_alone(gang, tmp_path, kind, ranks_each):
    nodes = make_nodes(tmp_path, 2)
    ranks = per_node(nodes, ranks_each, every=3, kind=kind)
    apart = [{**r, "local": f"{r['local']}-whole", "steps": 8} for r in ranks]
    whole = losses(gang.run("train", apart))
    gang.run("train", [{**r, "steps": 5} for r in ranks])

    ends = gang.run("train", [{**r, "steps": 8} for r in ranks])

    assert {tuple(end.result["start"][:3]) for end in ends} == {
        (5, 50 * sum(range(1, len(ranks) + 1)), "Local")
    }
    assert losses(ends) == [{s: x for s, x in rank.items() if int(s) > 5} for rank in whole]
    ours = {e.name for r in sealed_steps(nodes[1]) for s in r.seals.values() for e in s.files}
    assert not ours, "no node holds seals of all ranks"


def test_sigterm_on_one_rank_stops_all_at_one_step(gang, tmp_path):
    ranks = per_node([tmp_path], 2, steps=50, every=1000, ends={"terminate": 6})

    ends = gang.run("train", ranks)

    assert codes(ends) == [143, 143]
    (record,) = sealed_steps(tmp_path)
    assert record.attempt.step == 7
    assert {seal.reason for seal in record.seals.values()} == {SaveReason.TERMINATION}
    states = [state_of(tmp_path, rank) for rank in (0, 1)]
    assert [(s.phase, s.progress.step) for s in states] == [(Phase.FINISHED, 7)] * 2
    assert states[0].sealed.attempt == record.attempt


def test_sigterm_right_after_a_durable_step_saves_nothing(gang, tmp_path):
    remote = remote_root(tmp_path)
    node = tmp_path / "node"
    ranks = per_node([node], 2, every=1000, remote=str(remote))
    env = injected(node, remote)
    gang.run("train", [{**r, "steps": 5} for r in ranks], env=env)
    commit_newest([node], remote)

    ends = gang.run("train", [{**r, "steps": 50, "ends": {"terminate": 6}} for r in ranks], env=env)

    assert codes(ends) == [143, 143]
    assert [record.attempt.step for record in sealed_steps(node)] == [5]


def injected(node: Path, remote: Path) -> dict:
    """An environment as in a pod: something else flushes."""
    run_folder(node).mkdir(parents=True, exist_ok=True)
    return {
        "TIDEGATE_RUN": "tests/lm",
        "TIDEGATE_LOCAL": str(run_folder(node)),
        "TIDEGATE_REMOTE": str(run_folder(remote)),
    }


def test_ranks_that_end_at_different_steps_do_not_hang(gang, tmp_path):
    ranks = per_node([tmp_path], 2, steps=[9, 5])

    ends = gang.run("end_unevenly", ranks, timeout=20)

    assert codes(ends) == [0, 0]
    assert [record.attempt.step for record in sealed_steps(tmp_path)] == [3, 5]


def test_request_is_saved_and_answered_and_live_policy_taken(gang, tmp_path):
    ends = gang.run("save_on_request", per_node([tmp_path], 2, steps=9))

    assert codes(ends) == [0, 0]
    asked, due, _ = sealed_steps(tmp_path)
    assert {seal.reason for seal in asked.seals.values()} == {SaveReason.REQUEST}
    assert due.attempt.step == 8, "the live policy saves every 7 steps"
    answer = state_of(tmp_path, 0).answer
    assert answer.request_id == 2**62 + 1
    assert (answer.result, answer.attempt) == (AnswerResult.SEALED, asked.attempt)


def test_c024_failed_save_is_counted_and_the_next_one_works(gang, tmp_path):
    ends = gang.run("fail_once", per_node([tmp_path], 2, steps=6))

    assert codes(ends) == [0, 0]
    assert "cannot be copied" in ends[0].output
    saves = state_of(tmp_path, 0).saves
    assert saves.failed == 1
    assert sealed_steps(tmp_path)[-1].attempt.step == 6


def test_hung_save_of_one_rank_fails_on_all_and_the_next_one_works(gang, tmp_path):
    ends = gang.run("hang_once", per_node([tmp_path], 2, steps=6), timeout=20)

    assert codes(ends) == [0, 0]
    assert "not sealed within 4 s" in ends[1].output
    assert [record.attempt.step for record in sealed_steps(tmp_path)] == [5, 6]
    assert state_of(tmp_path, 0).saves.failed == 1


def test_second_sigterm_ends_the_process_at_once(gang, tmp_path):
    ends = gang.run("terminate_twice", per_node([tmp_path], 1))

    assert codes(ends) == [143]


def test_lost_rank_ends_saving_and_not_training(gang, tmp_path):
    ends = gang.run("lose_a_rank", per_node([tmp_path], 3), timeout=30)

    assert codes(ends) == [0, 0, 9]
    assert "saving has ended" in ends[0].output


def test_c018_fewer_ranks_restore_from_the_committed_copy(gang, tmp_path):
    remote = remote_root(tmp_path)
    nodes = make_nodes(tmp_path, 2)
    env = {"TIDEGATE_REMOTE": str(run_folder(remote))}
    gang.run("train", per_node(nodes, 1, steps=5, every=1000))
    commit_newest(nodes, remote)
    one = {"local": str(nodes[0]), "steps": 6, "every": 1000}

    (refused,) = gang.run("train", [one], env=env | {"TIDEGATE_LOCAL": injected_local(nodes[0])})
    (end,) = gang.run(
        "train",
        [{**one, "may_reshape": True}],
        env=env | {"TIDEGATE_LOCAL": injected_local(nodes[0])},
    )

    assert refused.code == 1
    assert "saved by 2 ranks, now there are 1" in refused.output
    assert end.code == 0
    assert end.result["start"][:3] == [5, 150, "Remote"]
    assert end.result["cursor"] == 6


def injected_local(node: Path) -> str:
    return str(run_folder(node))


def test_damaged_local_file_is_set_aside_and_the_remote_copy_read(gang, tmp_path, uninterrupted):
    remote = remote_root(tmp_path)
    node = tmp_path / "node"
    env = injected(node, remote)
    ranks = per_node([node], 2, every=1000)
    gang.run("train", [{**r, "steps": 5} for r in ranks], env=env)
    (record,) = sealed_steps(node)
    commit_newest([node], remote)
    damaged = run_folder(node) / record.folder / "weights-1.distcp"
    flip_bit(damaged)

    ends = gang.run("train", [{**r, "steps": 8} for r in ranks], env=env)

    assert ends[0].result["start"][:3] == [5, 150, "Remote"]
    assert not damaged.exists()
    (aside,) = (run_folder(node) / QUARANTINE).iterdir()
    assert aside.name.startswith(f"{step_folder(record.attempt)}.weights-1.distcp.")
    want = [{s: x for s, x in rank.items() if 5 < int(s) <= 8} for rank in uninterrupted]
    assert losses(ends) == want


@pytest.mark.parametrize("name", ["optim-0.distcp", METADATA])
def test_damaged_newest_step_without_another_copy_steps_back(gang, tmp_path, name):
    ranks = per_node([tmp_path], 2, every=3)
    gang.run("train", [{**r, "steps": 8} for r in ranks])
    *_, older, newest = sealed_steps(tmp_path)
    flip_bit(run_folder(tmp_path) / newest.folder / name)

    ends = gang.run("train", [{**r, "steps": 9} for r in ranks])

    step, _, _, reason = ends[1].result["start"]
    assert step == older.attempt.step
    assert f"step {newest.attempt.step}" in reason


def test_checkpoints_that_cannot_be_restored_are_no_fresh_start(gang, tmp_path):
    ranks = per_node([tmp_path], 2, every=1000)
    gang.run("train", [{**r, "steps": 3} for r in ranks])
    (record,) = sealed_steps(tmp_path)
    flip_bit(run_folder(tmp_path) / record.folder / "rest-1.distcp")
    again = [{**r, "steps": 4} for r in ranks]

    refused = [gang.run("train", again) for _ in range(2)]
    fresh = gang.run(
        "train", [{**r, "policy": {"start_fresh_when_unrestorable": True}} for r in again]
    )

    for ends in refused:
        assert codes(ends) == [1, 1]
        assert "none can be restored" in ends[0].output
    assert codes(fresh) == [0, 0]
    assert fresh[0].result["start"] is None


def test_remote_tier_that_is_gone_is_an_error_unless_the_policy_says_otherwise(gang, tmp_path):
    remote = remote_root(tmp_path)
    node = tmp_path / "node"
    env = injected(node, remote)
    local_only = {"policy": {"remote_unreachable_is_error": False}}
    one = {"local": str(node), "every": 1000}
    gang.run("train", [{**one, "steps": 2}], env=env)
    remote.rename(tmp_path / "away")

    (refused,) = gang.run("train", [{**one, "steps": 3}], env=env)
    (resumed,) = gang.run("train", [{**one, **local_only, "steps": 3}], env=env)

    assert refused.code == 1
    assert f"remote tier {remote}/tests/lm cannot be used" in refused.output
    assert resumed.code == 0
    assert resumed.result["start"][:3] == [2, 20, "Local"]


def test_known_run_without_a_local_step_waits_for_its_remote_tier(gang, tmp_path):
    remote = remote_root(tmp_path)
    node = tmp_path / "node"
    env = injected(node, remote)
    policy = {"remote_unreachable_is_error": False, "start_fresh_when_unrestorable": True}
    one = {"local": str(node), "every": 1000, "policy": policy}
    gang.run("train", [{**one, "steps": 2}], env=env)
    (record,) = sealed_steps(node)
    shutil.rmtree(run_folder(node) / record.folder)
    remote.rename(tmp_path / "away")

    (refused,) = gang.run("train", [{**one, "steps": 3}], env=env)

    assert refused.code == 1
    assert "Retry: run tests/lm: the remote tier cannot be read" in refused.output


def test_c023_trainer_without_a_cluster_flushes_by_its_own_child(gang, tmp_path):
    remote = remote_root(tmp_path)
    lost, new = make_nodes(tmp_path, 2)
    ranks = per_node([lost], 2, every=1000, remote=str(remote))
    gang.run("train", [{**r, "steps": 3} for r in ranks])

    ends = gang.run("train", [{**r, "local": str(new), "steps": 4} for r in ranks])

    assert codes(ends) == [0, 0]
    assert ends[1].result["start"][:3] == [3, 90, "Remote"]
    commits = sorted(run_folder(remote).glob("step-*/COMMIT"))
    assert len(commits) == 2


def test_committed_step_is_loaded_by_stock_torch(gang, tmp_path):
    remote = remote_root(tmp_path)
    nodes = make_nodes(tmp_path, 2)
    gang.run("train", per_node(nodes, 1, steps=5, every=1000))
    folder = commit_newest(nodes, remote)
    program = """
import json, sys, warnings
sys.modules["tidegate"] = sys.modules["tidegate_contract"] = None
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
model = {"0.weight": torch.zeros(32, 16)}
step = torch.zeros(())
state = {"model": model, "optim": {"state": {"0.weight": {"step": step}}}}
dcp.load(state, checkpoint_id=sys.argv[1])
print(json.dumps([float(model["0.weight"].abs().sum()), float(step)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    total, step = json.loads(done.stdout)
    assert total > 0
    assert step == 5.0
