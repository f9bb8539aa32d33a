"""A step that a person names: this one or none, on all ranks, and what training goes on from."""

import shutil
from pathlib import Path

import pytest
import torch
from rank_files import LoneRank, alone_in, commit_newest, flip_bit, run_folder, save_alone
from rank_files import sealed_steps as sealed

from tidegate.named import agree_step
from tidegate.restore import Outcome, Restore
from tidegate.site import Site, open_site
from tidegate.state import TrainingState
from tidegate_contract.errors import Reject, Retry
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import Attempt
from tidegate_contract.run_documents import scan_claims


class Three:
    """Three ranks that name these steps, as one of them sees it."""

    def __init__(self, *steps: object) -> None:
        self._steps = steps

    def gather(self, value: object) -> list[object]:
        return [repr(step) for step in self._steps]


def attempt(step: int, lineage: int = 1) -> Attempt:
    return Attempt(step=step, nonce=f"{lineage:08x}{step:08x}")


def save(site: Site, step: int, lineage: int = 1) -> Path:
    """A step whose weights are all its number, with the lineage behind the point."""
    live = torch.full((50,), step + lineage / 8)
    return save_alone(site, attempt(step, lineage), {"w": live}, lineage)


@pytest.fixture
def site(tmp_path) -> Site:
    """A run that saved three steps on its node; the first one is durable as well."""
    (tmp_path / "pfs").mkdir()
    site = open_site(alone_in(tmp_path), LoneRank())
    save(site, 5)
    commit_newest([tmp_path / "node"], tmp_path / "pfs")
    save(site, 7)
    save(site, 10)
    return site


def restore(site: Site, step: int | None = None) -> tuple[Outcome, set[float]]:
    live = torch.zeros(50)
    state = TrainingState({"w": live}, None, rank=0, keeps_rng=False, on_world_change=None)
    outcome = Restore(site, LoneRank(), state, step).run()
    return outcome, set(live.tolist())


def claims_on(root: Path, site: Site) -> list[LineageClaim]:
    with Folder.open(run_folder(root)) as run:
        return scan_claims(run, site.identity.run_id)


def test_named_step_is_restored_and_its_claim_says_that_a_person_named_it(site):
    outcome, live = restore(site, 5)
    assert (outcome.candidate.attempt, live) == (attempt(5), {5.125})
    assert (outcome.claim.explicit, outcome.claim.restored) == (True, attempt(5))
    assert outcome.reason == "step 5 was asked for"


def test_start_after_a_named_step_goes_on_from_it_and_not_from_a_newer_one(site):
    named, _ = restore(site, 5)
    again, _ = restore(site)
    save(site, 6, lineage=named.lineage)
    newest, live = restore(site)
    assert (again.candidate.attempt, again.claim.explicit) == (attempt(5), False)
    assert (newest.candidate.attempt, live) == (attempt(6, named.lineage), {6.25})


def test_step_that_is_not_there_is_refused_with_those_that_are_and_nothing_is_claimed(
    site, tmp_path
):
    with pytest.raises(Reject, match=r"step 6 is not there; newest others: 10, 7, 5$"):
        restore(site, 6)
    assert claims_on(tmp_path / "pfs", site) == claims_on(tmp_path / "node", site) == []


@pytest.mark.parametrize("may_start_fresh", [False, True])
def test_damaged_named_step_is_no_other_step_no_fresh_start_and_no_claim(
    tmp_path, site, may_start_fresh
):
    flip_bit(run_folder(tmp_path / "node") / f"step-{7:020d}.{attempt(7).nonce}" / "rest-0.distcp")
    settings = alone_in(tmp_path, start_fresh_when_unrestorable=may_start_fresh)
    site = open_site(settings, LoneRank())
    for _ in range(2):
        with pytest.raises(
            Reject, match=r"step 7 cannot be read \(.*rest-0.*; newest others: 10, 5$"
        ):
            restore(site, 7)
    assert claims_on(tmp_path / "pfs", site) == claims_on(tmp_path / "node", site) == []
    assert restore(site)[0].candidate.attempt == attempt(10)


def test_named_step_whose_near_copy_is_damaged_is_read_from_the_remote_tier(site, tmp_path):
    flip_bit(run_folder(tmp_path / "node") / f"step-{5:020d}.{attempt(5).nonce}" / "rest-0.distcp")
    outcome, live = restore(site, 5)
    assert (outcome.tier, live) == ("Remote", {5.125})
    assert [claim.number for claim in claims_on(tmp_path / "pfs", site)] == [outcome.lineage]


def test_older_save_of_the_named_step_is_taken_where_the_newer_one_is_damaged_and_told(site):
    again, _ = restore(site, 5)
    flip_bit(save(site, 7, again.lineage) / "rest-0.distcp")
    outcome, live = restore(site, 7)
    assert (outcome.candidate.attempt, live) == (attempt(7), {7.125})
    assert outcome.reason.startswith("step 7 was asked for (another save of it: ")


def test_named_step_that_failed_too_often_is_tried_all_the_same(site):
    for _ in range(3):
        restore(site)
    assert restore(site)[0].candidate.attempt == attempt(7)
    assert restore(site, 10)[0].candidate.attempt == attempt(10)


def test_step_named_before_anything_was_saved_is_no_fresh_start(tmp_path):
    (tmp_path / "pfs").mkdir()
    site = open_site(alone_in(tmp_path), LoneRank())
    with pytest.raises(Reject, match="step 5 is not there; there is no other one"):
        restore(site, 5)


def test_named_step_that_may_lie_on_a_remote_tier_that_is_away_is_tried_again_later(tmp_path, site):
    shutil.rmtree(run_folder(tmp_path / "node") / f"step-{5:020d}.{attempt(5).nonce}")
    site = open_site(alone_in(tmp_path, remote_unreachable_is_error=False), LoneRank())
    (tmp_path / "pfs").rename(tmp_path / "away")
    with pytest.raises(Retry, match="remote tier cannot be read"):
        restore(site, 5)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((5, 5, 10), "rank 0 names 5, rank 2 names 10"),
        ((None, 5, 5), "rank 0 names None, rank 1 names 5"),
        ((5, "5", 5), "rank 0 names 5, rank 1 names '5'"),
        ((-1, -1, -1), "step is -1; allowed is"),
        ((True, True, True), "step is True; allowed is"),
        ((5.0, 5.0, 5.0), r"step is 5\.0; allowed is"),
    ],
)
def test_step_that_ranks_cannot_agree_on_is_refused_on_each_of_them(steps, words):
    for own in steps:
        with pytest.raises(Reject, match=words):
            agree_step(Three(*steps), own)


@pytest.mark.long
@pytest.mark.torch_ranks
def test_ranks_that_name_different_steps_all_refuse_and_none_hangs(gang, tmp_path):
    rank = {"local": str(tmp_path), "every": 1000, "steps": 4}
    gang.run("train", [rank] * 2)

    ends = gang.run("train", [{**rank, "named": 4}, rank], timeout=20)

    assert [end.code for end in ends] == [1, 1]
    for end in ends:
        assert "Reject: restore: step must be the same on all ranks; rank 0 names 4, " in end.output


@pytest.mark.long
@pytest.mark.torch_ranks
def test_training_that_went_back_to_a_step_never_comes_back_to_a_newer_one(gang, tmp_path):
    rank = {"local": str(tmp_path), "every": 1000}
    gang.run("train", [{**rank, "every": 4, "steps": 10}] * 2)
    assert [record.attempt.step for record in sealed(tmp_path)] == [5, 9, 10]

    back = gang.run("train", [{**rank, "named": 5, "steps": 20, "ends": {"crash": 7}}] * 2)
    again = gang.run("train", [{**rank, "steps": 7}] * 2)
    newest = gang.run("train", [{**rank, "steps": 7}] * 2)

    assert [end.code for end in back] == [9, 9]
    assert [end.result["start"][0] for end in (*again, *newest)] == [5, 5, 7, 7]
