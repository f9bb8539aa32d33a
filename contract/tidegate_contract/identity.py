"""Who a run is, its restores and pins, tier ids. Pure documents; `publish` writes them."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from tidegate_contract.layout import Attempt, check_run_name

UNTOLD = datetime.min.replace(tzinfo=UTC)
"""The time of a claim that nothing tells more of than its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """`run.json`: created once on the remote tier, copied to the local ones.

    Attributes:
        run_id: UUID of the run.
        name: `namespace/name`.
        owner_uid: UID of the owner that a derived name is bound to; None when the user named it.
        uid: numeric user id of the trainer that made the run; files of this owner are trusted.
        created_at: UTC.
    """

    KIND: ClassVar[str] = "run"

    run_id: str
    name: str
    owner_uid: str | None = None
    uid: int
    created_at: datetime

    def __post_init__(self) -> None:
        """Refuses a name that could leave its folder."""
        check_run_name(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageClaim:
    """`lineages/<n>.json`: one restore of a run, claimed by rank 0 before anything is loaded.

    Attributes:
        run_id: UUID of the run.
        number: 1 + the highest number that any rank saw; newer means (lineage, step).
        restored: the attempt that was chosen; None for a fresh start.
        explicit: True when a person named the attempt: it is then ordered as (number, its step).
        tries: how often in a row this attempt was tried before and did not come back to training.
        claimed_at: UTC; `UNTOLD` where the document is damaged and nothing else tells of it.
    """

    KIND: ClassVar[str] = "lineage"

    run_id: str
    number: int
    restored: Attempt | None = None
    explicit: bool = False
    tries: int = 0
    claimed_at: datetime

    @property
    def is_lost(self) -> bool:
        """Only its number is known: it may have restored anything older, named by a person or not.

        No document says so; readers make such a claim of one that is damaged.
        """
        return self.claimed_at == UNTOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """`lineages/<n>.trained.json`: the restore of that lineage came back to training.

    Written by rank 0 after the first step that follows a restore. A claim without it is a try that
    failed, or has not ended. It repeats what the claim says, so that this survives one damaged
    document.

    Attributes:
        run_id: UUID of the run.
        number: of the lineage.
        restored: as in the claim.
        explicit: as in the claim; None where an earlier release wrote the word: then it tells
            nothing of the claim.
        trained_at: UTC.
    """

    KIND: ClassVar[str] = "trained"

    run_id: str
    number: int
    restored: Attempt | None = None
    explicit: bool | None = None
    trained_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """`pins/<step folder>.json` on the remote tier: a commit that no retention removes.

    Attributes:
        run_id: UUID of the run.
        attempt: which.
        reason: a person's words; may be empty.
        pinned_at: UTC.
    """

    KIND: ClassVar[str] = "pin"

    run_id: str
    attempt: Attempt
    reason: str = ""
    pinned_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class TierState:
    """`tier.json`: whether a node's local tier may be used, and why not.

    Attributes:
        root_id: random id of this disk's root, never the host's name.
        usable: False makes the injected sidecar refuse the tier.
        reason: a condition reason such as `OK`, `OnRootDisk`, `NotMounted`.
        checked_at: UTC.
    """

    KIND: ClassVar[str] = "tier"

    root_id: str
    usable: bool
    reason: str
    checked_at: datetime
