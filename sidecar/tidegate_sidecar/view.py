"""What the sidecar knows of one step and of the remote tier: small, picklable records. Pure.

`observe` makes them, `decide`, `retention` and `report` read them. They carry no file lists, so
they pass between processes at once, however many files a step has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import TRASH, Attempt
from tidegate_contract.restore_point import find_base, find_lost, order_key
from tidegate_contract.scan import StepRecord
from tidegate_contract.seal import SaveReason

Key = tuple[int, int, str]
"""(lineage, step, nonce), where an explicit restore re-dates what it named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitView:
    """A COMMIT that matched its manifest and its files' sizes."""

    committed_at: datetime
    manifest_sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step folder on one tier.

    Attributes:
        attempt: step and nonce.
        folder: relative to the run folder.
        lineage, tokens, world_size: of its seals or manifest; None while nothing there says so.
        sealed_at, reason: of the newest seal.
        sealed: rank → bytes that belong on the remote tier, for seals whose files are all there.
        announced: ranks that announced their files (remote tier only).
        commit: None unless the whole step counts.
        problems: a sentence for everything that was refused.
    """

    attempt: Attempt
    folder: str
    lineage: int | None = None
    tokens: int = 0
    world_size: int = 0
    sealed_at: datetime | None = None
    reason: SaveReason | None = None
    sealed: Mapping[int, int] = field(default_factory=dict)
    announced: frozenset[int] = frozenset()
    commit: CommitView | None = None
    problems: tuple[str, ...] = ()

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks whose files are complete here."""
        return frozenset(self.sealed)

    @property
    def is_in_trash(self) -> bool:
        """Moved aside; it may still be restored from there."""
        return self.folder.startswith(f"{TRASH}/")

    @property
    def is_complete(self) -> bool:
        """Every rank's receipt is here."""
        return self.world_size > 0 and self.ranks == frozenset(range(self.world_size))

    @property
    def is_announced_by_all(self) -> bool:
        """Every rank announced or delivered its files here."""
        return self.world_size > 0 and self.ranks | self.announced == frozenset(
            range(self.world_size)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteView:
    """The run's folder on the remote tier.

    Attributes:
        steps: all step folders, `.trash` included, by step.
        claims: all lineage claims.
        newest: the newest commit outside `.trash`, made durable and read again; None before any.
        trash_age_seconds: how long each step of `.trash` has lain there, by that tier's clock.
        pins: attempts that a person wants kept.
        half_emptied: attempts whose removal a crash left half done.
        hidden: attempts that a crash left hidden before it was judged whether they go.
        held: why nothing is removed at all; empty where nothing holds it.
    """

    steps: tuple[StepView, ...] = ()
    claims: tuple[LineageClaim, ...] = ()
    newest: StepView | None = None
    trash_age_seconds: Mapping[Attempt, float] = field(default_factory=dict)
    pins: frozenset[Attempt] = frozenset()
    half_emptied: tuple[Attempt, ...] = ()
    hidden: tuple[Attempt, ...] = ()
    held: str = ""

    def find(self, attempt: Attempt) -> StepView | None:
        """The step of this attempt; None where there is none."""
        return next((step for step in self.steps if step.attempt == attempt), None)

    def key(self, step: StepView) -> Key | None:
        """What "newer" means for this step; None while its lineage is not known."""
        if step.lineage is None:
            return None
        return order_key(step.attempt, step.lineage, self.claims)

    @property
    def newest_key(self) -> Key | None:
        """The key of the newest commit; None while there is none."""
        return self.key(self.newest) if self.newest else None

    @property
    def base(self) -> Attempt | None:
        """What the newest lineage goes on from, until that lineage has a commit of its own."""
        newest = self.newest_key
        claim = find_base(self.claims, newest[0] if newest else None)
        return claim.restored if claim else None

    @property
    def lost(self) -> LineageClaim | None:
        """A damaged claim that may have restored, or rolled back to, any step that is here."""
        newest = self.newest_key
        return find_lost(self.claims, newest[0] if newest else None)


def view_of(record: StepRecord) -> StepView:
    """The small record of a scanned folder."""
    known = record.announced | record.seals
    head = record.committed.manifest if record.committed else known[min(known)] if known else None
    if head is None:
        return StepView(attempt=record.attempt, folder=record.folder, problems=record.problems)
    return StepView(
        attempt=record.attempt,
        folder=record.folder,
        lineage=head.lineage,
        tokens=head.tokens,
        world_size=head.world_size,
        sealed_at=max([head.sealed_at, *(seal.sealed_at for seal in known.values())]),
        reason=head.reason,
        sealed={
            rank: sum(entry.size for entry in seal.flushed_files)
            for rank, seal in record.seals.items()
        },
        announced=frozenset(record.announced),
        commit=_commit_view(record),
        problems=record.problems,
    )


def _commit_view(record: StepRecord) -> CommitView | None:
    if record.committed is None:
        return None
    return CommitView(
        committed_at=record.committed.commit.committed_at,
        manifest_sha256=record.committed.commit.manifest_sha256,
        size_bytes=record.committed.manifest.size_bytes,
    )
