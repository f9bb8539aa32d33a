"""Restores of real ranks that fail, again and again, or find another way to the same step."""

from pathlib import Path

import pytest
from rank_files import commit_newest, remote_root, run_folder, sealed_steps

from tidegate_contract.folder import Folder
from tidegate_contract.layout import LINEAGES, QUARANTINE, TRASH, trained_file
from tidegate_contract.run_documents import read_identity, scan_claims

pytestmark = [pytest.mark.long, pytest.mark.torch_ranks]


def restored_steps(node: Path) -> list[int | None]:
    """What each restore has claimed, in their order."""
    with Folder.open(run_folder(node)) as run:
        claims = scan_claims(run, read_identity(run).run_id)
    return [claim.restored.step if claim.restored else None for claim in claims]


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.iterdir()}


def saved_run(gang, node: Path, *, steps: int = 5) -> tuple[dict, list[int]]:
    """A run of one rank that saved twice, its arguments, and the steps that it saved."""
    rank = {"local": str(node), "every": 2}
    gang.run("train", [{**rank, "steps": steps}])
    return {**rank, "every": 1000}, [record.attempt.step for record in sealed_steps(node)]


def test_c122_step_that_never_comes_back_to_training_is_set_aside(gang, tmp_path):
    rank, (*_, older, newest) = saved_run(gang, tmp_path)
    for _ in range(3):
        (end,) = gang.run("train", [{**rank, "steps": 9, "ends": {"stumble": True}}])
        assert end.code == 9

    (fourth,) = gang.run("train", [{**rank, "steps": 9}])
    (fifth,) = gang.run("train", [{**rank, "steps": 9}])

    step, *_, why = fourth.result["start"]
    assert step == older
    assert f"step {newest}: its restore was tried 3 times in a row" in why
    assert restored_steps(tmp_path) == [None, newest, newest, newest, older, 9]
    assert fifth.result["start"][0] == 9


def test_c122_job_that_trained_before_each_preemption_never_counts_as_failing(gang, tmp_path):
    rank, (*_, newest) = saved_run(gang, tmp_path)
    for _ in range(4):
        (end,) = gang.run(
            "train", [{**rank, "steps": 9, "ends": {"vanish": newest + 1}}], timeout=20
        )
        assert end.code == 9

    assert restored_steps(tmp_path) == [None, *[newest] * 4]


def test_each_node_of_a_run_without_a_remote_tier_has_the_word_that_it_trained(gang, tmp_path):
    nodes = [tmp_path / name for name in ("node0", "node1")]
    ranks = [{"local": str(node), "every": 1000} for node in nodes]
    gang.run("train", [{**rank, "steps": 2} for rank in ranks])

    gang.run("train", [{**rank, "steps": 9, "ends": {"vanish": 3}} for rank in ranks])

    words = [run_folder(node) / LINEAGES / trained_file(2) for node in nodes]
    assert [word.exists() for word in words] == [True, True]


def test_c134_c135_restores_that_die_at_once_change_nothing_and_never_lead_to_a_fresh_start(
    gang, tmp_path
):
    rank, (step,) = saved_run(gang, tmp_path, steps=1)
    (record,) = sealed_steps(tmp_path)
    before = listing(run_folder(tmp_path) / record.folder)
    for _ in range(3):
        gang.run("train", [{**rank, "steps": 9, "ends": {"stumble": True}}])
    assert restored_steps(tmp_path) == [None, step, step, step]
    assert listing(run_folder(tmp_path) / record.folder) == before

    fresh = {"start_fresh_when_unrestorable": True}
    (refused,) = gang.run("train", [{**rank, "steps": 9, "policy": fresh}])
    (again,) = gang.run("train", [{**rank, "steps": 9, "policy": {"max_restore_tries": 4}}])

    assert refused.code == 1
    assert "raise recovery.maxAttemptsPerStep" in refused.output
    assert again.result["start"][0] == step


def test_c135_local_file_that_gives_eacces_is_read_from_the_remote_tier(gang, tmp_path):
    remote, node = remote_root(tmp_path), tmp_path / "node"
    run_folder(node).mkdir(parents=True)
    env = {
        "TIDEGATE_RUN": "tests/lm",
        "TIDEGATE_LOCAL": str(run_folder(node)),
        "TIDEGATE_REMOTE": str(run_folder(remote)),
    }
    rank = {"local": str(node), "every": 1000}
    gang.run("train", [{**rank, "steps": 3}] * 2, env=env)
    commit_newest([node], remote)

    ends = gang.run("restore_past_a_bad_disk", [{"local": str(node)}] * 2, env=env)

    assert [end.result["start"][:3] for end in ends] == [[3, 90, "Remote"]] * 2
    assert ends[0].result["lineage"] == 2, "both looks are one try"
    assert not (run_folder(node) / QUARANTINE).exists()


def test_step_that_is_moved_back_from_trash_while_it_is_opened_is_restored(gang, tmp_path):
    remote, node = remote_root(tmp_path), tmp_path / "node"
    run_folder(node).mkdir(parents=True)
    env = {
        "TIDEGATE_RUN": "tests/lm",
        "TIDEGATE_LOCAL": str(run_folder(node)),
        "TIDEGATE_REMOTE": str(run_folder(remote)),
    }
    gang.run("train", [{"local": str(node), "every": 1000, "steps": 3}], env=env)
    step = commit_newest([node], remote)
    (step.parent / TRASH).mkdir()
    step.rename(step.parent / TRASH / step.name)
    fresh = tmp_path / "fresh"
    run_folder(fresh).mkdir(parents=True)

    (end,) = gang.run(
        "restore_what_moves",
        [{"local": str(fresh), "every": 1000}],
        env=env | {"TIDEGATE_LOCAL": str(run_folder(fresh))},
    )

    assert end.result["start"][:3] == [3, 30, "Remote"]


def test_one_node_that_holds_all_ranks_serves_another_number_of_them(gang, tmp_path):
    rank = {"local": str(tmp_path), "every": 1000}
    gang.run("train", [{**rank, "steps": 3}] * 2)

    (end,) = gang.run("train", [{**rank, "steps": 4, "may_reshape": True}])

    assert end.code == 0
    assert end.result["start"][:3] == [3, 90, "Local"]
