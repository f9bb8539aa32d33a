"""Which copies a run restores: the trainer restores them, the controller shows them. Pure.

The answer is the newest attempt, by (lineage, step), for which every rank has a source: its own
node's local copy if that was sealed by exactly the ranks the node has now, else the remote commit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import Attempt
from tidegate_contract.scan import StepRecord


class Source(StrEnum):
    """Where a rank reads from."""

    LOCAL = "Local"
    REMOTE = "Remote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One step on one tier, as `scan` found it.

    Attributes:
        attempt, lineage, tokens, world_size: of its seals or manifest.
        ranks: whose files are complete here.
        is_committed: the remote commit was read; always False on a local tier.
        is_announced: all ranks announced or sealed it here.
        folder: relative to the run folder.
    """

    attempt: Attempt
    lineage: int
    tokens: int
    world_size: int
    ranks: frozenset[int]
    is_committed: bool = False
    is_announced: bool = False
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Who restores, and what they see.

    Attributes:
        nodes: for each node the ranks on it; together 0…N-1.
        local: for each node its local copies, in the order of `nodes`.
        remote: copies on the remote tier; None when it could not be read.
        claims: all lineage claims.
        step: restore this step only; None means the newest.
    """

    nodes: tuple[frozenset[int], ...]
    local: tuple[tuple[Copy, ...], ...]
    remote: tuple[Copy, ...] | None
    claims: tuple[LineageClaim, ...] = ()
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An attempt that every rank can open.

    Attributes:
        attempt, lineage, tokens, world_size: of the copy.
        sources: rank → tier.
        remote_folder: relative to the remote run folder; None if nobody reads there.
    """

    attempt: Attempt
    lineage: int
    tokens: int
    world_size: int
    sources: tuple[Source, ...]
    remote_folder: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePoint:
    """The decision.

    Attributes:
        candidates: newest first; a failed vote takes the next one.
        refused: newer or equal attempts that were not offered, with a sentence each, newest first.
        pending: a newer attempt that all ranks announced and that may yet be committed.
    """

    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[Attempt, str], ...]
    pending: Attempt | None


def copy_of(record: StepRecord) -> Copy | None:
    """The copy in a scanned folder; None if nothing there is sealed, announced or committed."""
    if record.committed is not None:
        manifest = record.committed.manifest
        ranks = frozenset(range(manifest.world_size))
        head: tuple[int, int, int] = (manifest.lineage, manifest.tokens, manifest.world_size)
    else:
        known = record.announced | record.seals
        if not known:
            return None
        seal = known[min(known)]
        ranks = frozenset(record.seals)
        head = (seal.lineage, seal.tokens, seal.world_size)
    return Copy(
        attempt=record.attempt,
        lineage=head[0],
        tokens=head[1],
        world_size=head[2],
        ranks=ranks,
        is_committed=record.committed is not None,
        is_announced=record.is_sealed_by_all,
        folder=record.folder,
    )


def order_key(
    attempt: Attempt, lineage: int, claims: Sequence[LineageClaim]
) -> tuple[int, int, str]:
    """What "newer" means: (lineage, step), where an explicit restore re-dates what it named."""
    for claim in claims:
        if claim.explicit and claim.restored == attempt:
            lineage = max(lineage, claim.number)
    return (lineage, attempt.step, attempt.nonce)


def next_lineage(copies: Sequence[Copy], claims: Sequence[LineageClaim]) -> int:
    """1 + the highest number that was claimed or sealed."""
    return 1 + max([0, *(c.lineage for c in copies), *(c.number for c in claims)])


def decide_restore_point(world: World) -> RestorePoint:
    """Orders what can be restored; see the module's first lines for the rule."""
    by_attempt: dict[Attempt, Copy] = {}
    for copy in [*(world.remote or ()), *(c for node in world.local for c in node)]:
        by_attempt.setdefault(copy.attempt, copy)
    ordered = sorted(
        by_attempt.values(),
        key=lambda copy: order_key(copy.attempt, copy.lineage, world.claims),
        reverse=True,
    )
    remote = {copy.attempt: copy for copy in world.remote or ()}
    candidates, refused = [], []
    pending = None
    for copy in ordered:
        if world.step is not None and copy.attempt.step != world.step:
            continue
        found = _decide_candidate(world, copy, remote)
        if isinstance(found, Candidate):
            candidates.append(found)
            continue
        refused.append((copy.attempt, found))
        far = remote.get(copy.attempt)
        if not candidates and pending is None and far is not None and far.is_announced:
            pending = copy.attempt
    return RestorePoint(candidates=tuple(candidates), refused=tuple(refused), pending=pending)


def _decide_candidate(world: World, copy: Copy, remote: Mapping[Attempt, Copy]) -> Candidate | str:
    far = remote.get(copy.attempt)
    size = sum(len(ranks) for ranks in world.nodes)
    sources = [Source.REMOTE] * size
    for ranks, copies in zip(world.nodes, world.local, strict=True):
        near = next((c for c in copies if c.attempt == copy.attempt), None)
        is_near = near is not None and near.world_size == size and near.ranks == ranks
        if is_near:
            for rank in ranks:
                sources[rank] = Source.LOCAL
        elif far is None or not far.is_committed:
            where = (
                "the remote tier is not readable" if world.remote is None else "it is not durable"
            )
            return f"ranks {sorted(ranks)} have no whole local copy and {where}"
    is_far_read = Source.REMOTE in sources
    return Candidate(
        attempt=copy.attempt,
        lineage=copy.lineage,
        tokens=copy.tokens,
        world_size=copy.world_size,
        sources=tuple(sources),
        remote_folder=far.folder if far is not None and is_far_read else None,
    )
