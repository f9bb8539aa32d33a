"""What a restore reads is what was sealed, and whose it is; one rank without a process group."""

import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_files import LoneRank, alone_in, commit_newest, give_away, run_folder

from tidegate import reading, storage
from tidegate.planner import NodePlanner
from tidegate.restore import Outcome, Restore
from tidegate.site import Site, open_site
from tidegate.state import TrainingState
from tidegate.writer import Desk, Ticket, write_attempt
from tidegate_contract.digest import ContentHasher
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import QUARANTINE, Attempt, step_folder
from tidegate_contract.publish import write_document
from tidegate_contract.run_documents import read_identity
from tidegate_contract.seal import SaveReason

SIZE = 5000
STRANGER = 6666


def attempt(step: int) -> Attempt:
    return Attempt(step=step, nonce=f"{step:016x}")


def training(tensor: torch.Tensor) -> TrainingState:
    state = {"w": tensor, "v": tensor.clone(), "note": {"step": 0}}
    return TrainingState(state, None, rank=0, keeps_rng=False, on_world_change=None)


def save(site: Site, step: int) -> Path:
    """Saves a step whose weights are all its number; gives its folder on the node."""
    state = training(torch.full((SIZE,), float(step)))
    desk = Desk(
        run_folder=site.local,
        run_id=site.identity.run_id,
        rank=0,
        topology=site.topology,
        part_of=state.part_of,
    )
    ticket = Ticket(attempt=attempt(step), tokens=step, lineage=1, reason=SaveReason.CADENCE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        write_attempt(desk, ticket, state.capture(), NodePlanner(site.topology), None)
    return Path(site.local) / step_folder(attempt(step))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that saved two steps, in small blocks: each file has several."""
    monkeypatch.setattr(storage, "ContentHasher", lambda size=1 << 12: ContentHasher(size))
    (tmp_path / "pfs").mkdir()
    site = open_site(alone_in(tmp_path), LoneRank())
    older, newest = save(site, 3), save(site, 5)
    return SimpleNamespace(site=site, older=older, newest=newest, pfs=tmp_path / "pfs")


def restore(site: Site) -> tuple[Outcome, set[float]]:
    """The outcome, and what is in the live weights after it."""
    live = torch.full((SIZE,), -1.0)
    state = training(live)
    outcome = Restore(site, LoneRank(), state).run()
    return outcome, set(live.tolist()) | set(state.capture()["v"].tolist())


def between(monkeypatch, change: Callable[[], None], undo: Callable[[], None] = lambda: None):
    """Calls `change` after the files were verified and before they are loaded."""
    whole, calls = reading.Load.read, []

    def read(load: reading.Load) -> None:
        calls.append(load)
        change()
        try:
            whole(load)
        finally:
            undo()

    monkeypatch.setattr(reading.Load, "read", read)
    return calls


def exchange(path: Path) -> None:
    """Exchanges the numbers 5 and 9 in a file."""
    fives, nines, between = (struct.pack("<f", x) * 8 for x in (5, 9, 7))
    data = path.read_bytes().replace(fives, between)
    path.write_bytes(data.replace(nines, fives).replace(between, nines))


def once(change: Callable[[], None]) -> Callable[[], None]:
    left = [change]
    return lambda: left.pop()() if left else None


def test_restore_fills_the_live_tensors(run):
    outcome, live = restore(run.site)
    assert (outcome.candidate.attempt, live) == (attempt(5), {5.0})


def test_file_that_changes_after_it_was_verified_is_set_aside_and_the_older_step_restored(
    run, monkeypatch
):
    data = run.newest / "rest-0.distcp"
    between(monkeypatch, once(lambda: exchange(data)))

    outcome, live = restore(run.site)

    assert (outcome.candidate.attempt, live) == (attempt(3), {3.0})
    assert "rest-0.distcp: block" in outcome.reason
    assert not data.exists()
    (aside,) = (Path(run.site.local) / QUARANTINE).iterdir()
    assert aside.name.startswith(f"{run.newest.name}.rest-0.distcp")


def test_file_that_changes_after_it_was_verified_is_read_from_the_other_tier(run, monkeypatch):
    commit_newest([Path(run.site.settings.local.root)], run.pfs)
    between(monkeypatch, once(lambda: exchange(run.newest / "rest-0.distcp")))

    outcome, live = restore(run.site)

    assert (outcome.candidate.attempt, outcome.tier, live) == (attempt(5), "Remote", {5.0})


def test_file_that_was_read_badly_once_is_read_again(run, monkeypatch):
    data = run.newest / "rest-0.distcp"
    calls = between(monkeypatch, once(lambda: exchange(data)), once(lambda: exchange(data)))

    outcome, live = restore(run.site)

    assert (outcome.candidate.attempt, live, len(calls)) == (attempt(5), {5.0}, 2)


def test_file_that_is_read_badly_again_and_again_is_given_up(run, monkeypatch):
    data = run.newest / "rest-0.distcp"

    def flip() -> None:
        if calls[-1]._copy.folder.path.endswith(run.newest.name):
            exchange(data)

    calls = between(monkeypatch, flip, flip)

    outcome, live = restore(run.site)

    assert (outcome.candidate.attempt, live, len(calls)) == (attempt(3), {3.0}, 3)
    assert "rest-0.distcp: block" in outcome.reason
    assert data.exists()


def test_strangers_data_is_found_before_anything_live_is_written(run, monkeypatch):
    give_away(monkeypatch, STRANGER, run.newest / "rest-0.distcp")
    calls = between(monkeypatch, lambda: None)

    outcome, live = restore(run.site)

    assert (outcome.candidate.attempt, live, len(calls)) == (attempt(3), {3.0}, 1)
    assert f"belongs to uid {STRANGER}" in outcome.reason


@pytest.fixture
def foreign(run, monkeypatch):
    """A stranger made the run's folder on the remote tier, and its identity."""
    with Folder.open(run_folder(run.pfs)) as folder:
        identity = read_identity(folder)
        write_document(folder, "run.json", type(identity)(**fields_of(identity, uid=STRANGER)))
    give_away(monkeypatch, STRANGER, run_folder(run.pfs), run.newest)
    return run


def fields_of(document: object, **changes: object) -> dict:
    return {name: getattr(document, name) for name in document.__slots__} | changes


WORDS = (
    rf"step 5 is not restored: .*/[.]metadata: belongs to uid {STRANGER}, trusted are .*uids .*"
    rf"Options\(trusted_uids=.{STRANGER}.\).*run\.json names that user.* move .* aside"
)


@pytest.mark.parametrize("may_start_fresh", [False, True])
def test_file_of_the_user_that_a_strangers_identity_names_ends_the_restore(
    foreign, tmp_path, may_start_fresh
):
    site = open_site(alone_in(tmp_path, start_fresh_when_unrestorable=may_start_fresh), LoneRank())
    with pytest.raises(Reject, match=WORDS):
        restore(site)


def test_step_of_a_doubted_user_is_not_passed_over_for_a_fresh_start(foreign, tmp_path):
    (foreign.older / "seal-0.json").unlink()
    settings = alone_in(tmp_path, start_fresh_when_unrestorable=True)
    with pytest.raises(Reject, match=WORDS):
        restore(open_site(settings, LoneRank()))


def test_remote_copy_of_a_trusted_user_serves_where_the_nodes_is_a_doubted_ones(
    foreign, tmp_path, monkeypatch
):
    commit_newest([Path(foreign.site.settings.local.root)], foreign.pfs)
    monkeypatch.undo()
    give_away(monkeypatch, STRANGER, run_folder(foreign.pfs) / "run.json", foreign.newest)

    outcome, live = restore(open_site(alone_in(tmp_path), LoneRank()))

    assert (outcome.candidate.attempt, outcome.tier, live) == (attempt(5), "Remote", {5.0})


def test_files_of_a_user_that_the_program_names_are_restored(foreign, tmp_path):
    site = open_site(alone_in(tmp_path, trusted_uids=(STRANGER,)), LoneRank())
    outcome, live = restore(site)
    assert (outcome.candidate.attempt, live) == (attempt(5), {5.0})


def test_step_on_the_remote_tier_that_a_doubted_user_put_there_is_refused(
    foreign, tmp_path, monkeypatch
):
    commit_newest([Path(foreign.site.settings.local.root)], foreign.pfs)
    with pytest.raises(Reject, match=WORDS):
        restore(open_site(alone_in(tmp_path, node="other"), LoneRank()))
