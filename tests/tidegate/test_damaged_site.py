"""A trainer that starts on a damaged `run.json`: it is mended, or left with a sentence."""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_files import LoneRank, alone_in, flip_bit, give_away, run_folder, save_alone

from tidegate import writer
from tidegate.observe import observe_tiers
from tidegate.ranks import Topology
from tidegate.settings import Settings
from tidegate.site import Site, open_site
from tidegate.writer import build_desk
from tidegate_contract.errors import Corrupt, Reject, Retry, TidegateError
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, RunIdentity, Trained
from tidegate_contract.layout import (
    CONTROL_DOCUMENT,
    LINEAGES,
    QUARANTINE,
    RUN_DOCUMENT,
    Attempt,
    Part,
    lineage_file,
    seal_file,
    step_folder,
    trained_file,
)
from tidegate_contract.publish import (
    announce,
    claim_lineage,
    note_trained,
    write_document,
    write_seal,
)
from tidegate_contract.run_documents import read_identity
from tidegate_contract.seal import SaveReason, Seal

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
TRAINER = 4711
SAVED = Attempt(step=9, nonce=f"{9:016x}")
OTHER_ID = "0c0a5f0e-0000-4000-8000-000000000000"


class RanksInThreads:
    """Ranks of one process each, in threads: what each does, all get to know."""

    def __init__(self, rank: int, world_size: int, shared: dict[str, Any]) -> None:
        self.rank, self.world_size, self._shared = rank, world_size, shared

    def attempt(self, action: Callable[[], Any]) -> list[Any]:
        results, barrier = self._shared["results"], self._shared["barrier"]
        try:
            results[self.rank] = action()
        except Exception as error:  # noqa: BLE001  # the others wait for this rank's word
            results[self.rank] = error
        barrier.wait(10)
        seen = list(results)
        barrier.wait(10)
        for found in seen:
            if isinstance(found, TidegateError):
                raise found
            if isinstance(found, Exception):
                raise Retry(str(found))
        return seen


def open_sites(*settings: Settings) -> list[Any]:
    """The site of each node's one rank, or the error that it met."""
    count = len(settings)
    shared = {"results": [None] * count, "barrier": threading.Barrier(count)}
    sites: list[Any] = [None] * count

    def start(rank: int) -> None:
        try:
            sites[rank] = open_site(settings[rank], RanksInThreads(rank, count, shared))
        except TidegateError as error:
            sites[rank] = error

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sites


def document(root: Path) -> Path:
    return run_folder(root) / RUN_DOCUMENT


@pytest.fixture
def nodes(tmp_path: Path) -> list[Settings]:
    """Settings of two nodes of a run that was begun on both and on the remote tier."""
    (tmp_path / "pfs").mkdir()
    settings = [alone_in(tmp_path, node=f"node{index}") for index in (0, 1)]
    assert all(isinstance(site, Site) for site in open_sites(*settings))
    return settings


def a_step(run: Path, run_id: str, *, step: int = 100) -> str:
    attempt = Attempt(step=step, nonce=f"{step:016x}")
    seal = Seal(
        run_id=run_id,
        lineage=1,
        attempt=attempt,
        tokens=1,
        rank=0,
        world_size=1,
        sealed_at=NOW,
        reason=SaveReason.CADENCE,
        torch_version="",
        files=(),
    )
    with Folder.open(run) as folder, folder.ensure_child(step_folder(attempt)) as target:
        if "pfs" in run.parts:
            announce(target, seal)
        write_seal(target, seal)
    return step_folder(attempt)


@pytest.mark.parametrize("where", ["node0", "node1", "pfs"])
def test_damaged_identity_takes_the_bytes_of_the_others(
    tmp_path: Path, nodes: list[Settings], where: str
) -> None:
    want = document(tmp_path / "pfs").read_bytes()
    a_step(run_folder(tmp_path / where), identity_in(tmp_path / "pfs").run_id)
    flip_bit(document(tmp_path / where))
    damaged = document(tmp_path / where).read_bytes()

    sites = open_sites(*nodes)

    assert [site.identity for site in sites] == [identity_in(tmp_path / "pfs")] * 2
    assert {document(tmp_path / name).read_bytes() for name in ("node0", "node1", "pfs")} == {want}
    (aside,) = (run_folder(tmp_path / where) / QUARANTINE).iterdir()
    assert aside.read_bytes() == damaged


def identity_in(root: Path) -> RunIdentity:
    with Folder.open(run_folder(root)) as run:
        found = read_identity(run)
    assert found is not None
    return found


def test_node_without_the_run_and_one_with_it_mend_the_remote_tier(
    tmp_path: Path, nodes: list[Settings]
) -> None:
    want = document(tmp_path / "pfs").read_bytes()
    flip_bit(document(tmp_path / "pfs"))
    flip_bit(document(tmp_path / "node0"))
    fresh = alone_in(tmp_path, node="fresh")

    sites = open_sites(nodes[0], fresh, nodes[1])

    assert all(isinstance(site, Site) for site in sites)
    assert document(tmp_path / "pfs").read_bytes() == want
    assert document(tmp_path / "fresh").read_bytes() == want


def test_remote_identity_that_no_node_knows_stays_damaged_and_nothing_is_begun(
    tmp_path: Path, nodes: list[Settings]
) -> None:
    flip_bit(document(tmp_path / "pfs"))
    damaged = document(tmp_path / "pfs").read_bytes()

    with pytest.raises(Corrupt, match=r"run\.json: .*tidegate flush --once.*move the folder aside"):
        open_site(alone_in(tmp_path, node="fresh"), LoneRank())

    assert document(tmp_path / "pfs").read_bytes() == damaged
    assert not document(tmp_path / "fresh").exists()


@pytest.mark.parametrize("is_first", [True, False])
def test_remote_identity_of_which_the_nodes_copies_differ_stays_damaged(
    tmp_path: Path, nodes: list[Settings], is_first: bool
) -> None:
    other = RunIdentity(run_id=OTHER_ID, name="tests/lm", uid=0, created_at=NOW)
    with Folder.open(run_folder(tmp_path / "node0")) as run:
        write_document(run, RUN_DOCUMENT, other)
    flip_bit(document(tmp_path / "pfs"))

    sites = open_sites(*(nodes if is_first else reversed(nodes)))

    assert all("copies of it differ" in str(site) for site in sites)


@pytest.mark.parametrize("run_id", [OTHER_ID, None], ids=["another run's", "nobody's"])
def test_remote_identity_beside_steps_that_do_not_confirm_it_stays_damaged(
    tmp_path: Path, nodes: list[Settings], run_id: str | None
) -> None:
    name = a_step(run_folder(tmp_path / "pfs"), run_id or OTHER_ID)
    if run_id is None:
        for seal in (run_folder(tmp_path / "pfs") / name).iterdir():
            flip_bit(seal)
    flip_bit(document(tmp_path / "pfs"))
    damaged = document(tmp_path / "pfs").read_bytes()

    sites = open_sites(*nodes)

    assert all(isinstance(site, Corrupt) and name in str(site) for site in sites)
    assert document(tmp_path / "pfs").read_bytes() == damaged


def test_remote_identity_is_not_mended_with_that_of_another_name(
    tmp_path: Path, nodes: list[Settings]
) -> None:
    other = RunIdentity(run_id=OTHER_ID, name="tests/other", uid=0, created_at=NOW)
    for node in ("node0", "node1"):
        with Folder.open(run_folder(tmp_path / node)) as run:
            write_document(run, RUN_DOCUMENT, other)
    flip_bit(document(tmp_path / "pfs"))
    damaged = document(tmp_path / "pfs").read_bytes()

    assert all(isinstance(site, Reject) for site in open_sites(*nodes))
    assert document(tmp_path / "pfs").read_bytes() == damaged


@pytest.mark.parametrize("is_error", [True, False], ids=["error", "local only"])
def test_damaged_node_begins_no_run_on_an_empty_mount_point(tmp_path: Path, is_error: bool) -> None:
    (tmp_path / "pfs").mkdir()
    settings = alone_in(tmp_path, remote_unreachable_is_error=is_error)
    open_site(settings, LoneRank())
    flip_bit(document(tmp_path / "node"))
    (tmp_path / "pfs").rename(tmp_path / "away")
    (tmp_path / "pfs").mkdir()

    with pytest.raises(Retry, match="is the remote tier mounted"):
        open_site(settings, LoneRank())

    assert list((tmp_path / "pfs").iterdir()) == []


def test_both_copies_damaged_is_a_sentence_and_not_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    settings = alone_in(tmp_path)
    open_site(settings, LoneRank())
    flip_bit(document(tmp_path / "node"))
    flip_bit(document(tmp_path / "pfs"))

    with pytest.raises(Corrupt, match="no sound copy of it is at hand"):
        open_site(settings, LoneRank())


def test_damaged_identity_without_a_remote_tier_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pfs").mkdir()
    settings = alone_in(tmp_path)
    open_site(settings, LoneRank())
    flip_bit(document(tmp_path / "node"))
    monkeypatch.setattr(type(settings), "remote", None)

    with pytest.raises(Corrupt, match="no sound copy of it is at hand"):
        open_site(settings, LoneRank())


def test_steps_of_an_earlier_run_id_beside_a_damaged_identity_are_set_aside(
    tmp_path: Path,
) -> None:
    (tmp_path / "pfs").mkdir()
    settings = alone_in(tmp_path)
    former = open_site(settings, LoneRank()).identity.run_id
    name = a_step(run_folder(tmp_path / "node"), former)
    (run_folder(tmp_path / "node") / CONTROL_DOCUMENT).write_text("{}")
    flip_bit(document(tmp_path / "node"))
    os.rename(tmp_path / "pfs" / "tests", tmp_path / "pfs" / "former")
    begun = open_site(alone_in(tmp_path, node="other"), LoneRank())

    site = open_site(settings, LoneRank())

    assert site.identity == begun.identity == identity_in(tmp_path / "node")
    aside = run_folder(tmp_path / "node") / QUARANTINE / former
    assert {path.name for path in aside.iterdir()} == {name, RUN_DOCUMENT, CONTROL_DOCUMENT}
    assert not observe_tiers(site).damaged


def test_what_is_the_runs_own_stays_beside_an_identity_of_another_run(
    tmp_path: Path, nodes: list[Settings]
) -> None:
    """A late writer of that run came after this one had begun on the node."""
    run, own_id = run_folder(tmp_path / "node0"), identity_in(tmp_path / "pfs").run_id
    own, other = a_step(run, own_id, step=7), a_step(run, OTHER_ID, step=100)
    with Folder.open(run) as folder:
        for number, run_id in ((2, OTHER_ID), (3, own_id)):
            assert claim_lineage(folder, LineageClaim(run_id=run_id, number=number, claimed_at=NOW))
            assert note_trained(folder, Trained(run_id=run_id, number=number, trained_at=NOW))
        write_document(
            folder, RUN_DOCUMENT, replace(identity_in(tmp_path / "pfs"), run_id=OTHER_ID)
        )

    open_sites(*nodes)

    aside = run / QUARANTINE / OTHER_ID
    words = {number: {lineage_file(number), trained_file(number)} for number in (2, 3)}
    assert identity_in(tmp_path / "node0").run_id == own_id
    assert (run / own).exists() and not (run / other).exists()
    assert {path.name for path in aside.iterdir()} == {other, LINEAGES, RUN_DOCUMENT}
    assert {path.name for path in (aside / LINEAGES).iterdir()} == words[2]
    assert {path.name for path in (run / LINEAGES).iterdir()} == words[3]


def name_user(root: Path, uid: int) -> None:
    sound = identity_in(root)
    with Folder.open(run_folder(root)) as run:
        write_document(run, RUN_DOCUMENT, replace(sound, uid=uid))


@pytest.mark.parametrize("mended", ["node0", "node1"])
@pytest.mark.parametrize("is_doubted", [False, True], ids=["vouched for", "doubted"])
def test_copies_that_differ_in_the_user_only_mend_the_remote_tier(
    tmp_path: Path,
    nodes: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
    mended: str,
    is_doubted: bool,
) -> None:
    """A pass that mended one of them named its own user there."""
    want = identity_in(tmp_path / "pfs")
    other = "node1" if mended == "node0" else "node0"
    name_user(tmp_path / mended, TRAINER if is_doubted else os.getuid())
    name_user(tmp_path / other, TRAINER)
    if is_doubted:
        give_away(monkeypatch, TRAINER, document(tmp_path / other))
    flip_bit(document(tmp_path / "pfs"))

    sites = open_sites(*nodes)

    uid = os.getuid() if is_doubted else TRAINER
    assert [site.identity for site in sites] == [replace(want, uid=uid)] * 2
    assert identity_in(tmp_path / "pfs") == replace(want, uid=uid)
    assert sites[0].doubted_uids == ({TRAINER} if is_doubted else set())


def test_save_gives_a_damaged_identity_of_its_node_its_bytes_back(
    tmp_path: Path, nodes: list[Settings]
) -> None:
    """A sidecar that starts meanwhile waits for it."""
    site = open_site(nodes[0], LoneRank())
    want = document(tmp_path / "node0").read_bytes()
    flip_bit(document(tmp_path / "node0"))

    save_alone(site, SAVED, {"weights": torch.ones(3)})

    assert document(tmp_path / "node0").read_bytes() == want


def test_another_rank_of_a_node_leaves_its_identity_to_the_first_one(nodes: list[Settings]) -> None:
    site = open_site(nodes[0], LoneRank())
    shared = Topology(nodes=(frozenset({0, 1}),))
    desks = [build_desk(replace(site, rank=rank, topology=shared), Part) for rank in (0, 1)]
    assert [desk.identity for desk in desks] == [site.identity, None]


@pytest.mark.parametrize("trouble", ["another run's step", "error"])
def test_save_is_sealed_where_a_damaged_identity_stays(
    tmp_path: Path, nodes: list[Settings], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    site = open_site(nodes[0], LoneRank())
    run = run_folder(tmp_path / "node0")
    flip_bit(document(tmp_path / "node0"))
    damaged = document(tmp_path / "node0").read_bytes()
    if trouble == "another run's step":
        a_step(run, OTHER_ID)
    else:
        monkeypatch.setattr(writer, "mend_identity", refuse)

    folder = save_alone(site, SAVED, {"weights": torch.ones(3)})

    assert (folder / seal_file(0)).exists()
    assert document(tmp_path / "node0").read_bytes() == damaged


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
