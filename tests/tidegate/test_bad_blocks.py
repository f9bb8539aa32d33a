"""A trainer that starts on a node whose own disk has a bad block."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_files import LoneRank, alone_in, run_folder, save_alone

from tidegate.observe import (
    build_world,
    claim_next,
    mirror_claim,
    note_trained_behind,
    observe_tiers,
)
from tidegate.site import Site, open_site
from tidegate_contract.errors import Retry
from tidegate_contract.folder import Folder
from tidegate_contract.layout import (
    LINEAGES,
    QUARANTINE,
    Attempt,
    lineage_file,
    seal_file,
    step_folder,
    trained_file,
)

FIVE, SEVEN = (Attempt(step=step, nonce=f"{step:016x}") for step in (5, 7))
BAD = {
    "claim": (LINEAGES, lineage_file(2)),
    "word": (LINEAGES, trained_file(2)),
    "seal": (step_folder(FIVE), seal_file(0)),
}

Break = Callable[[Path], None]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A run of one rank with two steps, a claim and its word, all of them on both tiers."""
    (tmp_path / "pfs").mkdir()
    site = open_site(alone_in(tmp_path), LoneRank())
    steps = [save_alone(site, attempt, {"weights": torch.ones(3)}) for attempt in (FIVE, SEVEN)]
    claim = claim_next(site, build_world(site, [observe_tiers(site)]), SEVEN)
    mirror_claim(site, claim)
    for is_remote in (True, False):
        note_trained_behind(site, claim, is_remote=is_remote).join()
    for step in steps:
        shutil.copytree(step, run_folder(tmp_path / "pfs") / step.name)
    return site


@pytest.fixture
def break_file(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Reading this file, or opening this folder, gives EIO."""

    def install(path: Path) -> None:
        for method in ("read", "child"):
            whole = getattr(Folder, method)

            def refuse(folder: Folder, name: str, *rest: Any, whole: Any = whole) -> Any:
                if Path(folder.path, name) == path:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), name)
                return whole(folder, name, *rest)

            monkeypatch.setattr(Folder, method, refuse)

    return install


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_block_on_a_node_costs_what_lies_there_only(
    tmp_path: Path, site: Site, break_file: Break, bad: tuple[str, str]
) -> None:
    break_file(run_folder(tmp_path / "node").joinpath(*bad))

    view = observe_tiers(site)

    lost = {FIVE} if bad == BAD["seal"] else set()
    assert {copy.attempt for copy in view.local or ()} == {FIVE, SEVEN} - lost
    assert set(view.damaged) == lost
    assert [claim.number for claim in view.claims] == [2]
    assert view.trained == {2}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_remote_tier_that_gives_an_error_is_no_damaged_file(
    tmp_path: Path, site: Site, break_file: Break, bad: tuple[str, str]
) -> None:
    break_file(run_folder(tmp_path / "pfs").joinpath(*bad))

    with pytest.raises(Retry, match=r"remote tier cannot be read: .*Input/output error"):
        observe_tiers(site)


@pytest.mark.parametrize("root", ["node", "pfs"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_thing_in_quarantines_place_ends_no_look(
    tmp_path: Path, site: Site, root: str, kind: str
) -> None:
    path = run_folder(tmp_path / root) / QUARANTINE
    if kind == "file":
        path.touch()
    else:
        path.symlink_to(tmp_path)

    view = observe_tiers(site)

    assert len(view.local or ()) == len(view.remote or ()) == 2


def test_quarantine_of_a_node_that_cannot_be_opened_ends_no_look(
    tmp_path: Path, site: Site, break_file: Break
) -> None:
    break_file(run_folder(tmp_path / "node") / QUARANTINE)
    assert len(observe_tiers(site).local or ()) == 2
