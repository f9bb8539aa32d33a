"""The course of a training: what is owed, what stands still, what must not end it."""

import pytest
from rank_files import flip_bit, remote_root, run_folder, sealed_steps

pytestmark = pytest.mark.torch_ranks


@pytest.mark.parametrize("count", [1, 2])
def test_save_that_became_due_in_wait_is_made_at_the_next_step(gang, tmp_path, count):
    ranks = [{"local": str(tmp_path), "steps": 33, "every": 10}] * count

    ends = gang.run("wait_often", ranks)

    assert [end.code for end in ends] == [0] * count
    assert [record.attempt.step for record in sealed_steps(tmp_path)] == [11, 21, 31]


def test_stop_and_saves_are_heard_by_a_program_that_waits_at_each_step(gang, tmp_path):
    ranks = [{"local": str(tmp_path), "steps": 50, "every": 1}] * 2

    ends = gang.run("wait_often", ranks)

    assert [end.code for end in ends] == [143, 143]
    assert [record.attempt.step for record in sealed_steps(tmp_path)] == [11, 21, 27]


def test_save_without_a_free_slot_fails_once_and_is_not_owed(gang, tmp_path):
    one = {"local": str(tmp_path), "steps": 14, "on_failure": "Continue"}

    (end,) = gang.run("never_free", [one])

    assert end.code == 0
    assert end.result == {"waits": [11], "total": 2, "failed": 2}


def test_c025_saves_without_a_free_slot_end_training_where_the_policy_says_so(gang, tmp_path):
    one = {"local": str(tmp_path), "steps": 40, "on_failure": "Fail"}

    (end,) = gang.run("never_free", [one])

    assert end.result["ended"] == 11


def test_state_that_cannot_be_taken_at_the_first_step_does_not_end_training(gang, tmp_path):
    (end,) = gang.run("cannot_warm", [{"local": str(tmp_path), "steps": 12}])

    assert end.code == 0
    assert [record.attempt.step for record in sealed_steps(tmp_path)] == [11, 12]


def test_flusher_is_ended_when_the_restore_raises(gang, tmp_path):
    remote = remote_root(tmp_path)
    one = {"local": str(tmp_path / "node"), "remote": str(remote)}
    gang.run("train", [{**one, "steps": 2, "every": 1000}])
    for root in (tmp_path / "node", remote):
        for path in run_folder(root).glob("step-*/weights-0.distcp"):
            flip_bit(path)

    (end,) = gang.run("fail_restore", [one])

    assert end.result == {"is_left": False, "knows_parent": True}
