"""What the tests read from and do to a run's folders."""

import os
import warnings
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tidegate.planner import NodePlanner
from tidegate.settings import Arguments, Options, Settings, resolve_settings
from tidegate.site import Site
from tidegate.state import TrainingState
from tidegate.writer import Ticket, build_desk, write_attempt
from tidegate_contract.digest import ContentHasher
from tidegate_contract.document import decode
from tidegate_contract.folder import Folder
from tidegate_contract.layout import (
    METADATA_REMOTE,
    Attempt,
    parse_step_folder,
    state_file,
    step_folder,
)
from tidegate_contract.publish import announce, commit_step, ensure_identity, write_seal
from tidegate_contract.run_documents import read_identity
from tidegate_contract.scan import StepRecord, scan_step, scan_steps
from tidegate_contract.seal import SaveReason, Seal, file_entry
from tidegate_contract.wire import Policy, TrainerState

RUN = "tests/lm"


def run_folder(root: Path) -> Path:
    return root / RUN


class LoneRank:
    """The ranks of a run of one process, without any process group."""

    rank = 0
    world_size = 1

    def attempt(self, action: Callable[[], Any]) -> list[Any]:
        return [action()]

    def gather(self, value: Any) -> list[Any]:
        return [value]


def alone_in(
    tmp_path: Path,
    *,
    node: str = "node",
    environment: dict | None = None,
    trusted_uids: Collection[int] = (),
    **policy: Any,
) -> Settings:
    """Settings outside a cluster, on a folder of one node and the remote tier beside it."""
    given = Arguments(run=RUN, local=tmp_path / node, remote=tmp_path / "pfs")
    options = Options(policy=Policy(**policy), trusted_uids=trusted_uids)
    return resolve_settings(given, options, environment or {})


def give_away(monkeypatch: Any, uid: int, *places: Path) -> None:
    """Makes files of these names, or below these folders, look like this user's once open."""
    found = os.fstat

    def fstat(fd: int) -> os.stat_result:
        told = found(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not any(path.is_relative_to(place) for place in places):
            return told
        return os.stat_result((*told[:4], uid, *told[5:]))

    monkeypatch.setattr(os, "fstat", fstat)


def save_alone(
    site: Site,
    attempt: Attempt,
    state: dict,
    lineage: int = 1,
    planner: NodePlanner | None = None,
) -> Path:
    """Saves this state on the node without any process group; gives the step's folder."""
    entries = TrainingState(state, None, rank=0, keeps_rng=False, on_world_change=None)
    desk = build_desk(site, entries.part_of)
    ticket = Ticket(
        attempt=attempt, tokens=10 * attempt.step, lineage=lineage, reason=SaveReason.CADENCE
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        planner = planner or NodePlanner(site.topology)
        write_attempt(desk, ticket, entries.capture(), planner, None)
    return Path(site.local) / step_folder(attempt)


def sealed_steps(root: Path) -> list[StepRecord]:
    with Folder.open(run_folder(root)) as run:
        identity = read_identity(run)
        return [r for r in scan_steps(run, identity.run_id) if r.is_sealed_by_all]


def state_of(root: Path, rank: int) -> TrainerState:
    path = run_folder(root) / state_file(rank)
    return decode(TrainerState, path.read_bytes(), str(path))


def remote_root(tmp_path: Path) -> Path:
    root = tmp_path / "pfs"
    root.mkdir()
    return root


def write_step(site: Site, root: Path, attempt: Attempt, lineage: int = 1) -> None:
    """All receipts of a step of one rank, and no COMMIT; the first look at that tier commits it."""
    data = b"metadata"
    hasher = ContentHasher(1 << 12)
    hasher.update(data)
    seal = Seal(
        run_id=site.identity.run_id,
        lineage=lineage,
        attempt=attempt,
        tokens=50,
        rank=0,
        world_size=1,
        sealed_at=datetime(2026, 1, 1, tzinfo=UTC),
        reason=SaveReason.CADENCE,
        torch_version="2.15.0",
        files=(file_entry(METADATA_REMOTE, hasher.finish()),),
    )
    with Folder.open(run_folder(root)) as run, run.ensure_child(step_folder(attempt)) as step:
        announce(step, seal)
        with step.new_file(METADATA_REMOTE) as file:
            file.write(data)
            file.publish(len(data))
        write_seal(step, seal)


def commit_newest(locals_: list[Path], remote: Path) -> Path:
    """Copies the newest step of these nodes to the remote tier like a flusher; commits it."""
    with Folder.open(run_folder(locals_[0])) as near:
        identity = read_identity(near)
    names = [n for n in os.listdir(run_folder(locals_[0])) if parse_step_folder(n)]
    attempt = max(parse_step_folder(name) for name in names)
    os.makedirs(run_folder(remote), exist_ok=True)
    with Folder.open(run_folder(remote)) as far:
        ensure_identity(far, identity)
        with far.ensure_child(step_folder(attempt)) as target:
            for root in locals_:
                with Folder.open(run_folder(root) / step_folder(attempt)) as source:
                    record = scan_step(source, attempt, "", identity.run_id)
                    for seal in record.seals.values():
                        copy_rank(source, target, seal)
            committed = commit_step(target, attempt, identity.run_id, datetime.now(UTC))
    assert committed is not None
    return run_folder(remote) / step_folder(attempt)


def copy_rank(source: Folder, target: Folder, seal: Seal) -> None:
    announce(target, seal)
    for entry in seal.flushed_files:
        data = source.read(entry.name)
        with target.new_file(entry.name) as file:
            file.write(data)
            file.publish(len(data))
    write_seal(target, seal)


def make_nodes(tmp_path: Path, count: int) -> list[Path]:
    return [tmp_path / f"node{index}" for index in range(count)]


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
