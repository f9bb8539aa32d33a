"""Which copies a run restores: the trainer restores them, the controller shows them. Pure.

The answer is the newest attempt, by (lineage, step), for which every rank has a source: its own
node's local copy if this rank, or all ranks, sealed it there, else the remote commit. Whether a
rank then finds all that it needs is for the vote. A step whose restore failed too often in a row is
left to people.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import LINEAGES, TRASH, Attempt, lineage_file
from tidegate_contract.scan import StepRecord
from tidegate_contract.tries import count_failed_tries

_NAMED_RANKS = 8


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

    @property
    def is_in_trash(self) -> bool:
        """Moved aside: a commit there is still a candidate, but nobody goes on copying."""
        return self.folder.startswith(f"{TRASH}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Who restores, and what they see.

    Attributes:
        nodes: for each node the ranks on it; together 0…N-1.
        local: for each node its local copies, in the order of `nodes`.
        remote: copies on the remote tier; None when it could not be read.
        claims: all lineage claims, one for each number.
        step: a person wants this step and no other, however often it failed; None means the newest.
        trained: lineages that are known to have come back to training.
        running: lineages that this very restore has claimed: tries that have not failed yet.
        max_tries: failed restores in a row after which a step is set aside; None counts nothing.
        failed_local: (node, attempt) → why that node's copy could not be opened or verified.
    """

    nodes: tuple[frozenset[int], ...]
    local: tuple[tuple[Copy, ...], ...]
    remote: tuple[Copy, ...] | None
    claims: tuple[LineageClaim, ...] = ()
    step: int | None = None
    trained: frozenset[int] = frozenset()
    running: frozenset[int] = frozenset()
    max_tries: int | None = None
    failed_local: Mapping[tuple[int, Attempt], str] = field(default_factory=dict)

    @property
    def copies(self) -> list[Copy]:
        """The copies of both tiers."""
        return [*(self.remote or ()), *(copy for node in self.local for copy in node)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An attempt that every rank can open.

    Attributes:
        attempt, lineage, tokens, world_size: of the copy.
        sources: rank → tier.
        folders: rank → folder, relative to the run folder of that tier.
    """

    attempt: Attempt
    lineage: int
    tokens: int
    world_size: int
    sources: tuple[Source, ...]
    folders: tuple[str, ...]

    @property
    def remote_folder(self) -> str | None:
        """Relative to the remote run folder; None if nobody reads there."""
        pairs = zip(self.sources, self.folders, strict=True)
        return next((folder for source, folder in pairs if source is Source.REMOTE), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePoint:
    """The decision.

    Attributes:
        candidates: newest first; a failed vote takes the next one.
        refused: attempts that are not offered, with a sentence each, newest first.
        pending: an attempt newer than all candidates that all ranks announced and that may yet be
            committed.
        set_aside: those of `refused` that could be opened and failed too often.
        order: all attempts that were judged, newest first.
    """

    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[Attempt, str], ...]
    pending: Attempt | None
    set_aside: frozenset[Attempt] = frozenset()
    order: tuple[Attempt, ...] = ()


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


def find_base(claims: Sequence[LineageClaim], newest_lineage: int | None) -> LineageClaim | None:
    """The claim of what training goes on from, until its lineage has a commit of its own.

    What it restored may be older than the newest commit, where that one could not be restored.

    Args:
        claims: all lineage claims.
        newest_lineage: of the newest commit, as `order_key` gives it; None before any.
    """
    claim = max(claims, key=lambda claim: claim.number, default=None)
    is_over = claim is not None and newest_lineage is not None and newest_lineage >= claim.number
    return None if is_over else claim


def find_lost(claims: Sequence[LineageClaim], newest_lineage: int | None) -> LineageClaim | None:
    """The newest lost claim that may still matter: retention waits, and a restore says so.

    A commit of its lineage, or of a newer one, is newer than whatever it restored.

    Args:
        claims: all lineage claims.
        newest_lineage: of the newest commit, as `order_key` gives it; None before any.
    """
    lost = [
        c for c in claims if c.is_lost and (newest_lineage is None or c.number > newest_lineage)
    ]
    return max(lost, key=lambda claim: claim.number, default=None)


def explain_doubt(claims: Sequence[LineageClaim], chosen: Candidate | None) -> str | None:
    """A sentence if a person may have gone back to another step than the chosen one; else None.

    Args:
        claims: all lineage claims.
        chosen: what a restore takes; None where it takes nothing.
    """
    newest = order_key(chosen.attempt, chosen.lineage, claims)[0] if chosen is not None else None
    lost = find_lost(claims, newest)
    if lost is None:
        return None
    name = f"{LINEAGES}/{lineage_file(lost.number)}"
    return f"{name} is damaged: if a person went back to another step there, it is unknown"


def merge_claims(*places: Iterable[LineageClaim]) -> tuple[LineageClaim, ...]:
    """The claims of several folders, one for each number, by number.

    Args:
        places: the remote tier's first: where two of one number differ, the first one holds; but
            any claim comes before a lost one.
    """
    found: dict[int, LineageClaim] = {}
    for claim in chain.from_iterable(places):
        known = found.get(claim.number)
        if known is None or (known.is_lost and not claim.is_lost):
            found[claim.number] = claim
    return tuple(found[number] for number in sorted(found))


def next_lineage(copies: Sequence[Copy], claims: Sequence[LineageClaim]) -> int:
    """1 + the highest number that was claimed or sealed."""
    return 1 + max([0, *(c.lineage for c in copies), *(c.number for c in claims)])


def find_failed_tries(world: World) -> dict[Attempt, int]:
    """Attempt → restores in a row that did not come back to training, as far as the world tells.

    Nothing counts while the remote tier cannot be read: nodes have mirrors of its claims, and the
    words that those restores trained lie there alone.
    """
    if world.remote is None:
        return {}
    saved = {copy.lineage for copy in world.copies}
    return count_failed_tries(world.claims, saved | world.trained, world.running)


def decide_restore_point(world: World) -> RestorePoint:
    """Orders what can be restored; see the module's first lines for the rule."""
    by_attempt: dict[Attempt, Copy] = {}
    for copy in world.copies:
        if world.step is None or copy.attempt.step == world.step:
            by_attempt.setdefault(copy.attempt, copy)
    ordered = sorted(
        by_attempt.values(),
        key=lambda copy: order_key(copy.attempt, copy.lineage, world.claims),
        reverse=True,
    )
    view = _View(world)
    tired = _find_tired(world)
    candidates: list[Candidate] = []
    refused: list[tuple[Attempt, str]] = []
    set_aside: set[Attempt] = set()
    pending = None
    for copy in ordered:
        found = _decide_candidate(view, copy)
        if isinstance(found, str):
            refused.append((copy.attempt, found))
            if not candidates and pending is None and copy.attempt in view.coming:
                pending = copy.attempt
        elif copy.attempt in tired:
            refused.append((copy.attempt, tired[copy.attempt]))
            set_aside.add(copy.attempt)
        else:
            candidates.append(found)
    return RestorePoint(
        candidates=tuple(candidates),
        refused=tuple(refused),
        pending=pending,
        set_aside=frozenset(set_aside),
        order=tuple(copy.attempt for copy in ordered),
    )


def _find_tired(world: World) -> dict[Attempt, str]:
    """Attempts that failed too often, each with its sentence."""
    if world.max_tries is None or world.step is not None:
        return {}
    return {
        attempt: f"its restore was tried {tries} times in a row and never came back to training"
        for attempt, tries in find_failed_tries(world).items()
        if tries >= max(1, world.max_tries)
    }


class _View:
    """A world's copies by attempt: of two copies of one attempt in a place, the better one."""

    def __init__(self, world: World) -> None:
        far = world.remote or ()
        self.world = world
        self.size = sum(len(ranks) for ranks in world.nodes)
        self.far = _best_copies(far)
        self.coming = {c.attempt for c in far if c.is_announced and not c.is_in_trash}
        self.near = [_best_copies(copies) for copies in world.local]
        for node, attempt in world.failed_local:
            self.near[node].pop(attempt, None)


def _best_copies(copies: Iterable[Copy]) -> dict[Attempt, Copy]:
    best: dict[Attempt, Copy] = {}
    for copy in copies:
        other = best.get(copy.attempt)
        if other is None or _worth(copy) > _worth(other):
            best[copy.attempt] = copy
    return best


def _worth(copy: Copy) -> tuple[bool, int, bool]:
    return (copy.is_committed, len(copy.ranks), not copy.is_in_trash)


def _decide_candidate(view: _View, copy: Copy) -> Candidate | str:
    far = view.far.get(copy.attempt)
    is_durable = far is not None and far.is_committed
    sources = [Source.REMOTE] * view.size
    folders = [far.folder if far is not None else ""] * view.size
    lacking: list[int] = []
    for node, ranks in enumerate(view.world.nodes):
        near = view.near[node].get(copy.attempt)
        if near is None:
            lacking += ranks
            continue
        served = _served(near, ranks, view.size)
        lacking += ranks - served
        for rank in served:
            sources[rank], folders[rank] = Source.LOCAL, near.folder
    if lacking and not is_durable:
        return _explain_lack(view.world, copy.attempt, lacking)
    return Candidate(
        attempt=copy.attempt,
        lineage=copy.lineage,
        tokens=copy.tokens,
        world_size=copy.world_size,
        sources=tuple(sources),
        folders=tuple(folders),
    )


def _served(near: Copy, ranks: frozenset[int], size: int) -> frozenset[int]:
    """Which of a node's ranks read its copy: those that sealed it there, or all if it is whole.

    A whole one serves any number of ranks. Another rank's part alone says nothing about what this
    rank needs.
    """
    if len(near.ranks) == near.world_size:
        return ranks
    return ranks & near.ranks if near.world_size == size else frozenset()


def _explain_lack(world: World, attempt: Attempt, lacking: Sequence[int]) -> str:
    named = sorted(lacking)
    more = f" and {len(named) - _NAMED_RANKS} more" if len(named) > _NAMED_RANKS else ""
    where = "the remote tier is not readable" if world.remote is None else "it is not durable"
    whys = [why for (_, failed), why in world.failed_local.items() if failed == attempt]
    told = f" ({whys[0]})" if whys else ""
    who = f"ranks {named[:_NAMED_RANKS]}{more} have" if len(named) > 1 else f"rank {named[0]} has"
    return f"{who} no whole local copy{told} and {where}"
