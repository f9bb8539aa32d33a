"""The cast of every scenario: a run of two ranks on two nodes, its attempts, and their exact bytes.

Everything is fixed, so that what lies on a disk can be compared with what should lie there. Files
are written through the contract alone, in the trainer's order.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

from tidegate_contract.digest import ContentHasher
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import (
    METADATA,
    METADATA_REMOTE,
    QUARANTINE,
    RUN_DOCUMENT,
    Attempt,
    Part,
    data_file,
    parse_step_folder,
    step_folder,
)
from tidegate_contract.publish import announce, ensure_identity, write_seal
from tidegate_contract.run_documents import read_identity
from tidegate_contract.seal import SaveReason, Scope, Seal, file_entry
from tidegate_crash.scenario import Fact, History, Place

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
RUN = "team/run"
RANKS = (0, 1)
"""Rank r saved on node r."""
BLOCK = 1 << 12
_DATA_BYTES = BLOCK + 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """An attempt of the stage.

    Attributes:
        attempt: step and nonce.
        run_id: whose it is.
        lineage: that sealed it.
    """

    attempt: Attempt
    run_id: str
    lineage: int


RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NEXT_RUN_ID = "0b9c3d52-8c11-4f0a-8a54-51f3a1d6c7e2"


def _save(step: int, nonce: int, lineage: int = 1, run_id: str = RUN_ID) -> Save:
    attempt = Attempt(step=step, nonce=f"{nonce:016x}")
    return Save(attempt=attempt, run_id=run_id, lineage=lineage)


FOUR = _save(4, 0xA4)
FIVE = _save(5, 0xA5)
SIX = _save(6, 0xA6)
FIVE_AGAIN = _save(5, 0xB5, lineage=2)
"""Step 5, saved anew after a restore."""
NEXT_THREE = _save(3, 0xC3, run_id=NEXT_RUN_ID)
"""Of the run that a user made anew under the same name."""
SAVES = (FOUR, FIVE, SIX, FIVE_AGAIN, NEXT_THREE)


def save_of(attempt: Attempt) -> Save | None:
    """The stage's save of an attempt; None for one that nobody made."""
    return next((save for save in SAVES if save.attempt == attempt), None)


def identity_of(run_id: str = RUN_ID) -> RunIdentity:
    """`run.json` of a run of the stage."""
    return RunIdentity(run_id=run_id, name=RUN, uid=os.getuid(), created_at=NOW)


def _bytes(save: Save, name: str, size: int) -> bytes:
    """Bytes that no two attempts, ranks or files share."""
    seed = f"{save.run_id} {save.attempt} {save.lineage} {name}".encode()
    return hashlib.shake_128(seed).digest(size)


@cache
def local_bytes(save: Save, rank: int) -> Mapping[str, tuple[bytes, Scope]]:
    """name → bytes and scope of everything that a rank seals."""
    weights = data_file(Part.WEIGHTS, rank)
    files = {weights: (_bytes(save, weights, _DATA_BYTES), Scope.BOTH)}
    if rank == 0:
        files[METADATA_REMOTE] = (_bytes(save, METADATA_REMOTE, 100), Scope.BOTH)
    files[METADATA] = (_bytes(save, f"{METADATA} of node {rank}", 120), Scope.LOCAL)
    return files


@cache
def remote_bytes(save: Save) -> Mapping[str, bytes]:
    """name → bytes of everything that a committed step holds."""
    files = {
        name: data
        for rank in RANKS
        for name, (data, scope) in local_bytes(save, rank).items()
        if scope is Scope.BOTH
    }
    return {**files, METADATA: files[METADATA_REMOTE]}


@cache
def seal_of(save: Save, rank: int) -> Seal:
    """What a rank's seal says."""
    entries = []
    for name, (data, scope) in local_bytes(save, rank).items():
        hasher = ContentHasher(BLOCK)
        hasher.update(data)
        entries.append(file_entry(name, hasher.finish(), scope))
    return Seal(
        run_id=save.run_id,
        lineage=save.lineage,
        attempt=save.attempt,
        tokens=save.attempt.step * 1000,
        rank=rank,
        world_size=len(RANKS),
        sealed_at=NOW,
        reason=SaveReason.CADENCE,
        torch_version="2.15.0",
        files=tuple(entries),
    )


def open_folder(path: str) -> Folder:
    """An open folder; what is missing of its path is made, durably."""
    try:
        return Folder.open(path)
    except FileNotFoundError:
        above, name = os.path.split(path)
        with open_folder(above) as parent:
            return parent.ensure_child(name)


def make_remote(place: Place, run_id: str = RUN_ID) -> str:
    """The run's folder and identity on the remote tier, as rank 0 leaves them at its start.

    Returns:
        The id of the run that is there now.
    """
    with open_folder(place.remote) as run:
        return ensure_identity(run, identity_of(run_id)).run_id


def make_local(place: Place, node: int, run_id: str = RUN_ID) -> None:
    """The same on a node, as its first rank leaves them; another run's data is set aside."""
    with open_folder(place.nodes[node]) as run:
        found = read_identity(run)
        if found is not None and found.run_id != run_id:
            _set_aside(run, found.run_id)
        ensure_identity(run, identity_of(run_id))


def make_run(place: Place, run_id: str = RUN_ID) -> None:
    """The run's folders and identity on all tiers; a run that is there stays the run."""
    found = make_remote(place, run_id)
    for node in range(len(place.nodes)):
        make_local(place, node, found)


def _set_aside(run: Folder, run_id: str) -> None:
    """Mirrors the trainer's `site`: run.json goes last, until then it says whose data this is."""
    with run.ensure_child(QUARANTINE) as quarantine, quarantine.ensure_child(run_id) as aside:
        for name in run.names():
            if parse_step_folder(name) is not None:
                run.rename(name, name, into=aside)
        run.rename(RUN_DOCUMENT, RUN_DOCUMENT, into=aside)
        aside.sync()
    run.sync()


def write_rank(step: Folder, save: Save, rank: int, scopes: frozenset[Scope]) -> None:
    """A rank's files, each published durably."""
    for name, (data, scope) in local_bytes(save, rank).items():
        if scope in scopes:
            with step.new_file(name) as file:
                file.write(data)
                file.publish(len(data))


def seal(place: Place, history: History, save: Save, rank: int) -> None:
    """What a trainer's writer thread does on its node: data, metadata, and the seal last."""
    with (
        Folder.open(place.nodes[rank]) as run,
        run.ensure_child(step_folder(save.attempt)) as step,
    ):
        write_rank(step, save, rank, frozenset(Scope))
        write_seal(step, seal_of(save, rank))
    history.note(Fact.SEALED, save.attempt, rank)


def deliver(place: Place, save: Save, ranks: tuple[int, ...] = RANKS) -> None:
    """What flushers leave on the remote tier before the commit: files and receipts."""
    with (
        Folder.open(place.remote) as run,
        run.ensure_child(step_folder(save.attempt)) as step,
    ):
        for rank in ranks:
            announce(step, seal_of(save, rank))
            write_rank(step, save, rank, frozenset({Scope.BOTH}))
            write_seal(step, seal_of(save, rank))
