"""A restore of one rank without a process group: fresh starts, and the word that it trained."""

import errno
import shutil
import threading
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rank_files import LoneRank, alone_in, run_folder, write_step

from tidegate import observe
from tidegate.observe import build_world, claim_next, note_trained_behind, observe_tiers
from tidegate.restore import Restore
from tidegate.site import Site, open_site
from tidegate_contract.errors import Reject, Retry
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import Attempt, step_folder
from tidegate_contract.restore_point import World
from tidegate_contract.run_documents import scan_claims, scan_trained

FIVE = Attempt(step=5, nonce="0000000000000005")
A_CLAIM = LineageClaim(run_id="r", number=2, claimed_at=datetime(2026, 1, 1, tzinfo=UTC))


def a_site(tmp_path, **policy) -> Site:
    (tmp_path / "pfs").mkdir(exist_ok=True)
    return open_site(alone_in(tmp_path, **policy), LoneRank())


def test_run_that_lost_its_identity_is_not_begun_anew_over_its_steps(tmp_path) -> None:
    site = a_site(tmp_path)
    write_step(site, tmp_path / "pfs", FIVE)
    (run_folder(tmp_path / "pfs") / "run.json").unlink()
    shutil.rmtree(run_folder(site.settings.local.root))
    with pytest.raises(Reject, match=r"run\.json is missing, but steps lie beside it"):
        a_site(tmp_path)


def world_of(site: Site, **changes) -> World:
    return replace(build_world(site, [observe_tiers(site)]), **changes)


@pytest.mark.parametrize("may_start_fresh", [False, True])
def test_c135_empty_tiers_are_a_fresh_start(tmp_path, may_start_fresh):
    site = a_site(tmp_path, start_fresh_when_unrestorable=may_start_fresh)
    outcome = Restore(site, LoneRank(), None).run()
    assert (outcome.candidate, outcome.lineage) == (None, 1)
    assert outcome.reason == "no step was ever saved"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_c135_step_folders_that_cannot_be_opened_are_no_fresh_start(tmp_path, monkeypatch, code):
    site = a_site(tmp_path)
    write_step(site, tmp_path / "pfs", FIVE)
    opened = Folder.child

    def child(folder: Folder, name: str) -> Folder:
        if name.startswith("step-"):
            raise OSError(code, "cannot be opened")
        return opened(folder, name)

    monkeypatch.setattr(Folder, "child", child)
    with pytest.raises(Retry, match="remote tier cannot be read"):
        Restore(site, LoneRank(), None).run()


@pytest.mark.parametrize("tier", ["node", "pfs"])
def test_c135_only_step_whose_seals_are_damaged_is_no_fresh_start(tmp_path, tier):
    site = a_site(tmp_path)
    write_step(site, tmp_path / tier, FIVE)
    for path in (run_folder(tmp_path / tier) / step_folder(FIVE)).glob("*.json"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(Reject, match=r"1 checkpoints exist .*step 5: .*seal-0|announced-0"):
        Restore(site, LoneRank(), None).run()


@pytest.mark.parametrize("is_error", [True, False], ids=["Fail", "LocalOnly"])
@pytest.mark.parametrize("may_start_fresh", [False, True])
def test_c135_remote_tier_that_hangs_is_no_fresh_start(
    tmp_path, monkeypatch, may_start_fresh, is_error
):
    site = a_site(
        tmp_path,
        start_fresh_when_unrestorable=may_start_fresh,
        remote_unreachable_is_error=is_error,
    )
    impatient = replace(site.settings.policy, stall_timeout_seconds=0.05)
    site = replace(site, settings=replace(site.settings, policy=impatient))
    ends = threading.Event()
    monkeypatch.setattr(observe, "open_known", lambda _: ends.wait())
    with pytest.raises(Retry, match="remote tier cannot be read"):
        Restore(site, LoneRank(), None).run()
    ends.set()


def test_step_that_only_lacks_its_commit_is_committed_before_the_choice(tmp_path):
    site = a_site(tmp_path)
    write_step(site, tmp_path / "pfs", FIVE)
    (copy,) = observe_tiers(site).remote
    assert copy.is_committed


def test_word_of_a_restore_that_trained_lies_beside_its_claim_and_clears_its_tries(tmp_path):
    site = a_site(tmp_path)
    write_step(site, tmp_path / "pfs", FIVE)
    made = [claim_next(site, world_of(site), FIVE) for _ in range(3)]
    note_trained_behind(site, made[1], is_remote=True).join()

    claim_next(site, world_of(site), FIVE)

    with Folder.open(run_folder(tmp_path / "pfs")) as run:
        claims = scan_claims(run, site.identity.run_id)
        trained = scan_trained(run, site.identity.run_id)
    assert [claim.number for claim in made] == [2, 3, 4]
    assert [claim.tries for claim in claims] == [0, 1, 2, 1]
    assert [claim.explicit for claim in claims] == [False] * 4
    assert trained == {3}


def test_claim_for_a_step_that_a_person_named_says_so(tmp_path):
    site = a_site(tmp_path)
    write_step(site, tmp_path / "pfs", FIVE)
    claim_next(site, world_of(site, step=5), FIVE)
    (claim,) = observe_tiers(site).remote_claims
    assert claim.explicit


def test_word_is_written_to_the_node_where_the_claim_lies_there(tmp_path):
    site = a_site(tmp_path)
    claim = claim_next(site, world_of(site, remote=None), FIVE)
    note_trained_behind(site, claim, is_remote=False).join()
    view = observe_tiers(site)
    assert (view.trained, [claim.number for claim in view.claims]) == ({1}, [1])


def test_word_is_tried_again_after_an_error_and_never_raises(tmp_path, monkeypatch, caplog):
    site = a_site(tmp_path)
    waits = []
    monkeypatch.setattr(observe.time, "sleep", waits.append)
    (tmp_path / "pfs").rename(tmp_path / "away")

    note_trained_behind(site, A_CLAIM, is_remote=True).join()

    assert waits == [0.0, 5.0, 60.0, 300.0]
    assert "not noted that training goes on" in caplog.text


def test_training_goes_on_where_no_thread_can_be_had_for_the_word(tmp_path, monkeypatch, caplog):
    site = a_site(tmp_path)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert note_trained_behind(site, A_CLAIM, is_remote=True) is None
    assert "no thread" in caplog.text
