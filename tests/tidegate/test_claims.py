"""Claims and their mirrors: what a restore still knows once a document or a tier is away."""

import errno
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rank_files import LoneRank, alone_in, run_folder, write_step

from tidegate.observe import (
    build_world,
    claim_next,
    find_existing_attempts,
    mirror_claim,
    note_trained_behind,
    observe_tiers,
)
from tidegate.ranks import Topology
from tidegate.restore import Restore
from tidegate.site import Site, open_site
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import (
    LINEAGES,
    Attempt,
    lineage_file,
    step_folder,
    trained_file,
)
from tidegate_contract.publish import claim_lineage, ensure_identity
from tidegate_contract.restore_point import Copy, World, decide_restore_point, find_failed_tries
from tidegate_contract.run_documents import scan_claims

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FIVE, SEVEN = (Attempt(step=step, nonce=f"{step:016x}") for step in (5, 7))
RANKS = (0, 1)


def a_site(tmp_path: Path, **policy: object) -> Site:
    """A run of one rank with two durable steps."""
    (tmp_path / "pfs").mkdir(exist_ok=True)
    site = open_site(alone_in(tmp_path, **policy), LoneRank())
    for attempt in (FIVE, SEVEN):
        write_step(site, tmp_path / "pfs", attempt)
    return site


def two_sites(tmp_path: Path, **policy: object) -> list[Site]:
    """Two ranks on a node each."""
    first = a_site(tmp_path, **policy)
    topology = Topology(nodes=(frozenset({0}), frozenset({1})))
    settings = [alone_in(tmp_path, node=node, **policy) for node in ("node", "other")]
    run_folder(tmp_path / "other").mkdir(parents=True)
    with Folder.open(run_folder(tmp_path / "other")) as run:
        ensure_identity(run, first.identity)
    return [replace(first, topology=topology, settings=settings[r], rank=r) for r in RANKS]


def world_of(*sites: Site) -> World:
    return build_world(sites[0], [observe_tiers(site) for site in sites])


def chosen(*sites: Site) -> int:
    return decide_restore_point(world_of(*sites)).candidates[0].attempt.step


def go_back_to_five(site: Site) -> LineageClaim:
    return claim_next(site, replace(world_of(site), step=5), FIVE)


def lineages(root: Path) -> Path:
    return run_folder(root) / LINEAGES


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def claimed_by(site: Site, root: Path) -> list[LineageClaim]:
    with Folder.open(run_folder(root)) as run:
        return scan_claims(run, site.identity.run_id)


@pytest.mark.parametrize("is_told_by", ["word", "mirror", "nobody"])
def test_restore_after_a_rollback_whose_claim_is_damaged_takes_the_named_step(tmp_path, is_told_by):
    site = a_site(tmp_path)
    claim = go_back_to_five(site)
    assert chosen(site) == 5
    if is_told_by == "word":
        note_trained_behind(site, claim, is_remote=True).join()
    if is_told_by == "mirror":
        mirror_claim(site, claim)

    cut(lineages(tmp_path / "pfs") / lineage_file(claim.number))

    assert chosen(site) == (7 if is_told_by == "nobody" else 5)


def test_rollback_is_known_by_the_mirror_of_any_node(tmp_path):
    first, second = two_sites(tmp_path)
    claim = go_back_to_five(replace(first, topology=Topology(nodes=(frozenset({0}),))))
    mirror_claim(second, claim)
    cut(lineages(tmp_path / "pfs") / lineage_file(claim.number))
    assert chosen(first, second) == 5


@pytest.mark.parametrize(
    ("is_damaged", "own", "is_told"),
    [(True, [], True), (False, [], False), (True, [(9, 2)], False)],
    ids=["lost", "whole", "lost, and its lineage has saved"],
)
def test_reason_says_that_a_claim_is_damaged_where_that_may_matter(
    tmp_path, is_damaged, own, is_told
):
    site = a_site(tmp_path)
    claim = claim_next(site, world_of(site), SEVEN)
    for step, lineage in own:
        attempt = Attempt(step=step, nonce=f"{step:016x}")
        write_step(site, tmp_path / "pfs", attempt, lineage)
    if is_damaged:
        cut(lineages(tmp_path / "pfs") / lineage_file(claim.number))
    restore = Restore(site, LoneRank(), None)

    point = restore._observe()
    reason = restore._explain(point, point.candidates[0])

    assert reason.startswith(f"step {own[0][0] if own else 7} is the newest step")
    assert ("lineages/2.json is damaged" in reason) is is_told


def test_claim_of_a_restore_is_mirrored_and_holds_the_same_bytes(tmp_path):
    (tmp_path / "pfs").mkdir()
    site = open_site(alone_in(tmp_path), LoneRank())
    assert Restore(site, LoneRank(), None).run().lineage == 1
    far, near = (lineages(tmp_path / tier) / lineage_file(1) for tier in ("pfs", "node"))
    assert far.read_bytes() == near.read_bytes()


def test_mirror_that_cannot_be_written_stops_no_restore(tmp_path, caplog):
    (tmp_path / "pfs").mkdir()
    site = open_site(alone_in(tmp_path), LoneRank())
    lineages(tmp_path / "node").write_text("mine")
    mirror_claim(site, LineageClaim(run_id="r", number=1, claimed_at=NOW))
    assert "has no mirror on this node" in caplog.text


def test_mirrors_of_an_earlier_run_id_are_set_aside_again_and_again(tmp_path):
    """The remote tier is changed for another one, back, and once more."""
    spare = tmp_path / "spare"
    (tmp_path / "pfs").mkdir()
    open_site(alone_in(tmp_path, node="third"), LoneRank())
    (tmp_path / "pfs").rename(spare)
    (tmp_path / "pfs").mkdir()
    settings = alone_in(tmp_path)
    for number in range(1, 5):
        site = open_site(settings, LoneRank())
        mirror_claim(site, LineageClaim(run_id=site.identity.run_id, number=number, claimed_at=NOW))
        (tmp_path / "pfs").rename(tmp_path / "held")
        spare.rename(tmp_path / "pfs")
        (tmp_path / "held").rename(spare)
    aside = run_folder(tmp_path / "node") / "quarantine"
    names = [sorted(path.name for path in (run / LINEAGES).iterdir()) for run in aside.iterdir()]
    assert sorted(names) == [["1.json", "3.json"], ["2.json"]]


def away(tmp_path: Path) -> None:
    (tmp_path / "pfs").rename(tmp_path / "away")


@pytest.mark.parametrize("knows", RANKS)
def test_restore_without_the_remote_tier_claims_above_what_any_node_knows(tmp_path, knows):
    sites = two_sites(tmp_path, remote_unreachable_is_error=False)
    for root in ("node", "other"):
        write_step(sites[0], tmp_path / root, SEVEN)
    seventh = LineageClaim(run_id=sites[0].identity.run_id, number=7, claimed_at=NOW)
    with Folder.open(run_folder(tmp_path / "pfs")) as run:
        claim_lineage(run, seventh)
    mirror_claim(sites[knows], seventh)
    away(tmp_path)

    world = world_of(*sites)
    claim = claim_next(sites[0], world, SEVEN)

    assert (world.remote, claim.number) == (None, 8)
    assert claimed_by(sites[0], tmp_path / "node")[-1] == claim


def test_claim_of_the_remote_tier_holds_against_another_one_of_its_number(tmp_path):
    first, second = two_sites(tmp_path)
    claim = go_back_to_five(replace(first, topology=Topology(nodes=(frozenset({0}),))))
    mirror_claim(second, replace(claim, restored=SEVEN, explicit=False))
    mirror_claim(second, replace(claim, number=6, restored=SEVEN, explicit=False))

    world = world_of(first, second)

    assert [(c.number, c.restored) for c in world.claims] == [(2, FIVE), (6, SEVEN)]
    assert claim_next(first, world, FIVE).number == 7


def test_restores_that_trained_do_not_count_as_failed_while_their_words_are_away(tmp_path):
    site = a_site(tmp_path, remote_unreachable_is_error=False)
    write_step(site, tmp_path / "node", SEVEN)
    for _ in range(3):
        claim = claim_next(site, world_of(site), SEVEN)
        mirror_claim(site, claim)
        note_trained_behind(site, claim, is_remote=True).join()
    assert not (lineages(tmp_path / "node") / trained_file(claim.number)).exists()
    away(tmp_path)
    assert chosen(site) == 7
    assert claim_next(site, world_of(site), SEVEN).tries == 0


def test_mirror_does_not_count_as_a_second_try(tmp_path):
    first, second = two_sites(tmp_path)
    for _ in range(2):
        claim = claim_next(first, world_of(first, second), SEVEN)
        for site in (first, second):
            mirror_claim(site, claim)
    assert find_failed_tries(world_of(first, second)) == {SEVEN: 2}


@pytest.mark.parametrize(
    ("is_remote", "want"),
    [(True, [True, False, False]), (False, [False, True, True])],
    ids=["claimed on the remote tier", "claimed on the nodes"],
)
def test_word_lies_where_the_claim_does(tmp_path, is_remote, want):
    """A node may be replaced; what its claim was a mirror of is a failed try without the word."""
    first, second = two_sites(tmp_path)
    claim = go_back_to_five(replace(first, topology=Topology(nodes=(frozenset({0}),))))
    for site in (first, second):
        telling = note_trained_behind(site, claim, is_remote=is_remote)
        if telling is not None:
            telling.join()
    name = trained_file(claim.number)
    assert [(lineages(tmp_path / at) / name).exists() for at in ("pfs", "node", "other")] == want


def test_word_on_another_node_counts(tmp_path):
    """Rank 0 was there when it was said."""
    first, second = two_sites(tmp_path, remote_unreachable_is_error=False)
    claim = claim_next(first, world_of(first, second), SEVEN)
    note_trained_behind(second, claim, is_remote=False).join()
    assert find_failed_tries(world_of(first, second)) == {SEVEN: 0}


def test_seal_of_a_node_is_a_checkpoint_though_only_a_mirror_knows_its_lineage(tmp_path):
    """The remote tier was lost and begun anew: what it says of a torn first save is no proof."""
    part = Copy(
        attempt=FIVE,
        lineage=1,
        tokens=1,
        world_size=2,
        ranks=frozenset({1}),
        folder=step_folder(FIVE),
    )
    nodes = (frozenset({0}), frozenset({1}))
    claim = LineageClaim(run_id="r", number=1, claimed_at=NOW)
    world = World(nodes=nodes, local=((), (part,)), remote=(), claims=(claim,))
    assert find_existing_attempts(world, claimed=set()) == {FIVE}
    assert find_existing_attempts(world, claimed={1}) == set()


@pytest.mark.parametrize("tier", ["pfs", "node"])
def test_claim_that_cannot_be_read_takes_its_number_and_stops_no_restore(
    tmp_path, monkeypatch, tier
):
    site = a_site(tmp_path)
    mirror_claim(site, claim_next(site, world_of(site), SEVEN))
    whole = Folder.read

    def read(folder: Folder, name: str, *rest: int) -> bytes | None:
        if name == lineage_file(2) and f"/{tier}/" in folder.path:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return whole(folder, name, *rest)

    monkeypatch.setattr(Folder, "read", read)
    world = world_of(site)
    assert [(claim.number, claim.is_lost) for claim in world.claims] == [(2, False)]
    assert claim_next(site, world, SEVEN).number == 3
