"""Two tiers that cannot be two are refused before anything is written."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_files import LoneRank, alone_in, commit_newest, run_folder, save_alone

from tidegate.settings import Place
from tidegate.site import open_site
from tidegate_contract.errors import Reject
from tidegate_contract.layout import Attempt

FIVE = Attempt(step=5, nonce="00000000000000a5")


def everything(root: Path) -> set[Path]:
    return {path.relative_to(root) for path in root.rglob("*")}


@pytest.mark.parametrize(
    ("local", "remote", "want"),
    [
        ("pfs", "pfs", "are the same folder"),
        ("pfs", "pfs/below", "remote lies inside local"),
        ("pfs/below", "pfs", "local lies inside remote"),
    ],
)
def test_tiers_that_are_not_apart_are_refused_and_nothing_is_made(
    tmp_path: Path, local: str, remote: str, want: str
) -> None:
    for name in (local, remote):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    before = everything(tmp_path)
    settings = alone_in(tmp_path)
    parts = settings.local.parts
    swapped = replace(
        settings,
        local=Place(root=tmp_path / local, parts=parts),
        remote=Place(root=tmp_path / remote, parts=parts),
    )
    with pytest.raises(Reject, match=want):
        open_site(swapped, LoneRank())
    assert everything(tmp_path) == before


def test_swapped_tiers_are_refused_and_the_durable_step_stays(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    settings = alone_in(tmp_path)
    save_alone(open_site(settings, LoneRank()), FIVE, {"weights": torch.ones(3)})
    commit_newest([tmp_path / "node"], tmp_path / "pfs")
    before = everything(tmp_path)
    swapped = replace(settings, local=settings.remote, remote=settings.local)
    with pytest.raises(Reject, match=r"COMMIT|announced.* belongs to a remote tier: .*swapped"):
        open_site(swapped, LoneRank())
    assert everything(tmp_path) == before
    assert run_folder(tmp_path / "pfs").is_dir()
