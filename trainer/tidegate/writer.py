"""One attempt on one rank: data files, this node's metadata, the seal last. Writer thread only."""

import logging
import pickle
import queue
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta

from tidegate.planner import NodePlanner
from tidegate.ranks import Topology
from tidegate.site import Site
from tidegate.storage import StepStorage
from tidegate_contract.errors import Corrupt, Reject, TidegateError
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import (
    METADATA,
    METADATA_REMOTE,
    Attempt,
    Part,
    data_file,
    parse_seal_file,
    step_folder,
)
from tidegate_contract.publish import mend_identity, write_seal
from tidegate_contract.run_documents import read_identity
from tidegate_contract.seal import SaveReason, Scope, Seal

_LOG = logging.getLogger(__name__)
_REPLICA_PREFIX = f"{Part.REPLICA}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One attempt, the same on all ranks.

    Attributes:
        attempt: step and nonce.
        tokens: agreed count at that step.
        lineage: of this restore.
        reason: why it is saved.
        request_id: of the save request that it answers; 0 means none.
    """

    attempt: Attempt
    tokens: int
    lineage: int
    reason: SaveReason
    request_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What stays the same for all saves of one trainer.

    Attributes:
        run_folder: the run's folder on the local tier.
        run_id: UUID of the run.
        rank, topology: who writes.
        part_of: flat name of an entry → the file that it belongs into.
        identity: what a damaged `run.json` of the node is written anew from; None on ranks that
            leave that to their node's first one.
    """

    run_folder: str
    run_id: str
    rank: int
    topology: Topology
    part_of: Callable[[str], Part]
    identity: RunIdentity | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(ranks) for ranks in self.topology.nodes)


def build_desk(site: Site, part_of: Callable[[str], Part]) -> Desk:
    """The desk of this rank."""
    return Desk(
        run_folder=site.local,
        run_id=site.identity.run_id,
        rank=site.rank,
        topology=site.topology,
        part_of=part_of,
        identity=site.identity if site.is_first_of_node else None,
    )


class ShardWriter(FileSystemWriter):  # type: ignore[misc]  # torch is not typed here
    """DCP's writer: weights, optimizer, rest and replicas each in a file of this rank."""

    def __init__(self, desk: Desk, folder: Folder) -> None:
        """Takes the open step folder."""
        super().__init__(folder.path, overwrite=False, sync_files=False)
        self._desk = desk
        self._folder = folder
        self.fs = self.storage = StepStorage(folder)

    def storage_meta(self) -> Any:
        """DCP's hook; without the folder's absolute path, which is another one on each tier."""
        return StorageMeta(save_id=self.save_id)

    def prepare_local_plan(self, plan: Any) -> Any:
        """DCP's hook: refuses a folder that already holds something of this rank.

        Raises:
            Reject: the attempt's id was used before.
        """
        mine = {data_file(part, self._desk.rank) for part in Part}
        for name in self._folder.names():
            if name in mine or parse_seal_file(name) == self._desk.rank:
                raise Reject(f"{self._folder.path}/{name}: this attempt was written before")
        return plan

    def write_data(self, plan: Any, planner: Any) -> Any:
        """DCP's hook: writes this rank's items and its node's replicas, file by file."""
        by_part: dict[Part, list[Any]] = {part: [] for part in Part}
        for item in plan.items:
            by_part[self._desk.part_of(item.index.fqn)].append(item)
        by_part[Part.REPLICA] = list(plan.planner_data.replicas)
        files: queue.Queue[tuple[Any, str, list[Any]]] = queue.Queue()
        for part, items in by_part.items():
            if items:
                name = data_file(part, self._desk.rank)
                files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """DCP's hook on rank 0: where every item lies; replicas ride on `metadata.replicas`."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {}
        metadata.replicas = [{} for _ in self._desk.topology.nodes]
        for rank, written in enumerate(results):
            node = metadata.replicas[self._desk.topology.node_of(rank)]
            for result in written:
                is_replica = result.storage_data.relative_path.startswith(_REPLICA_PREFIX)
                (node if is_replica else metadata.storage_data)[result.index] = result.storage_data


def write_attempt(
    desk: Desk, ticket: Ticket, entries: dict[str, Any], planner: NodePlanner, group: Any
) -> int:
    """Writes and seals this rank's part; all ranks call it for the same ticket.

    Args:
        desk: this trainer.
        ticket: the attempt.
        entries: the snapshot, in host memory.
        planner: of this save.
        group: gloo group of the writer threads.

    Returns:
        Bytes that this rank sealed.

    Raises:
        CheckpointException: a rank failed; the group is still usable. A BaseException.
        RuntimeError: a peer hangs or is gone; the group is not usable any more.
        OSError, TidegateError: this rank's metadata or seal failed; other ranks may have sealed.
    """
    torch.serialization.set_crc32_options(False)  # holds for the calling thread only
    with (
        Folder.open(desk.run_folder) as run,
        run.ensure_child(step_folder(ticket.attempt)) as folder,
    ):
        writer = ShardWriter(desk, folder)
        metadata = dcp.save(entries, storage_writer=writer, planner=planner, process_group=group)
        _write_metadata(desk, writer.storage, metadata)
        seal = _build_seal(desk, ticket, writer.storage)
        write_seal(folder, seal)
        _mend_damaged(run, desk.identity)
        return sum(entry.size for entry in seal.files)


def _mend_damaged(run: Folder, identity: RunIdentity | None) -> None:
    """Writes a damaged `run.json` of the node anew; the save is as good without.

    It was read at the start, and a sidecar that starts later can flush nothing without it.
    """
    if identity is None:
        return
    try:
        try:
            read_identity(run)
        except Corrupt as damage:
            mend_identity(run, identity, needs_word=False)
            _LOG.warning("%s; it is written anew", damage, extra={"run": identity.name})
    except (OSError, TidegateError) as error:
        _LOG.warning("the run's identity stays as it is: %s", error)


def _write_metadata(desk: Desk, storage: StepStorage, metadata: Any) -> None:
    replicas = metadata.__dict__.pop("replicas")
    if desk.rank == 0:
        storage.write_file(METADATA_REMOTE, pickle.dumps(metadata), Scope.BOTH)
    if desk.topology.is_first(desk.rank):
        own = replicas[desk.topology.node_of(desk.rank)]
        local = replace(metadata, storage_data={**metadata.storage_data, **own})
        storage.write_file(METADATA, pickle.dumps(local), Scope.LOCAL)


def _build_seal(desk: Desk, ticket: Ticket, storage: StepStorage) -> Seal:
    entries = tuple(
        replace(entry, scope=Scope.LOCAL) if entry.name.startswith(_REPLICA_PREFIX) else entry
        for entry in storage.entries
    )
    return Seal(
        run_id=desk.run_id,
        lineage=ticket.lineage,
        attempt=ticket.attempt,
        tokens=ticket.tokens,
        rank=desk.rank,
        world_size=desk.world_size,
        sealed_at=datetime.now(UTC),
        reason=ticket.reason,
        torch_version=str(torch.__version__),
        files=entries,
    )
