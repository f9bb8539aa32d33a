"""What a crash run consists of: places, promises, actors, checks. The meeting point of the parts.

Scenarios know nothing of schedules, and whoever runs one (on the simulated disk, or as real
processes on real folders) knows nothing of Tidegate. Actors and checks use production code only,
on the paths of a `Place`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from tidegate_contract.layout import Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one run lives.

    Attributes:
        remote: the run's folder on the remote tier.
        nodes: the run's folder on each node.
        remote_root: the folder above `remote`: where another run of the same name is made.
    """

    remote: str
    nodes: tuple[str, ...]
    remote_root: str


SIMULATED = Place(
    remote="/remote/team/run",
    nodes=("/node0/team/run", "/node1/team/run"),
    remote_root="/remote/team",
)
"""On the simulated disk, whose mounts are `/remote`, `/node0` and `/node1`."""


class Fact(StrEnum):
    """What happened and is now promised to somebody, or excuses a loss.

    Attributes:
        SEALED: `write_seal` of one rank returned; the number is the rank.
        COMMITTED: `commit_step` or `confirm_commit` returned it, so somebody may act on it.
        REPORTED: a person or the cluster was told that it is durable.
        ROLLED_BACK: an explicit restore claimed it; the number is the lineage.
        RESTORED: a restore returned it; the number is the lineage.
        PINNED: a person was told that retention never moves it.
        REMOVED: a person removed it on purpose, or made the run anew.
        DISK_LOST: a node's disk is gone (noted by whoever runs the fault); the number is the node.
        FLIPPED: a bit of a file flipped (noted by whoever runs the fault).
    """

    SEALED = "sealed"
    COMMITTED = "committed"
    REPORTED = "reported"
    ROLLED_BACK = "rolled back"
    RESTORED = "restored"
    PINNED = "pinned"
    REMOVED = "removed"
    DISK_LOST = "disk lost"
    FLIPPED = "flipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One fact.

    Attributes:
        kind: what happened.
        attempt: to which attempt; None where it concerns none.
        number: rank, node or lineage, by `kind`; None where it has none.
    """

    kind: Fact
    attempt: Attempt | None = None
    number: int | None = None


class History:
    """What was promised so far: kept outside the disk, so it survives every crash.

    Equal and of equal hash when the same was promised; `copy` is cheap.
    """

    __slots__ = ("complaints", "notes")

    def __init__(
        self, notes: frozenset[Note] = frozenset(), complaints: frozenset[str] = frozenset()
    ) -> None:
        """Starts with what is known."""
        self.notes = notes
        self.complaints = complaints

    def note(self, kind: Fact, attempt: Attempt | None = None, number: int | None = None) -> None:
        """Adds a fact; the same one twice is one."""
        self.notes |= {Note(kind=kind, attempt=attempt, number=number)}

    def complain(self, sentence: str) -> None:
        """An actor saw what must never be seen; the checks hand it on as a violation."""
        self.complaints |= {sentence}

    def has(self, kind: Fact, attempt: Attempt | None = None, number: int | None = None) -> bool:
        """True if exactly this was noted."""
        return Note(kind=kind, attempt=attempt, number=number) in self.notes

    def of(self, kind: Fact) -> list[Note]:
        """All notes of a kind, by attempt and number."""
        found = [note for note in self.notes if note.kind is kind]
        return sorted(found, key=lambda n: (n.attempt is not None, n.attempt or 0, n.number or 0))

    def copy(self) -> "History":
        """A history that goes its own way from here."""
        return History(self.notes, self.complaints)

    def __eq__(self, other: object) -> bool:
        """Equal if the same was promised."""
        if not isinstance(other, History):
            return NotImplemented
        return (self.notes, self.complaints) == (other.notes, other.complaints)

    def __hash__(self) -> int:
        """Of the present content: a key must be a copy."""
        return hash((self.notes, self.complaints))

    def __repr__(self) -> str:
        """The facts in words."""
        words = [
            " ".join(str(p) for p in (n.kind, n.attempt, n.number) if p is not None)
            for n in sorted(self.notes, key=repr)
        ]
        return f"History({', '.join([*words, *sorted(self.complaints)])})"


Actor = Callable[[Place, History], None]
"""One process's work: sequential, no threads, no sleeping, no clock; ends by returning.

It may raise what production raises (OSError, TidegateError).
"""

Check = Callable[[Place, History], list[str]]
"""The violations in this state, a sentence each. Reads only."""


class Fault(StrEnum):
    """What may happen to a scenario besides its actors' own calls.

    Attributes:
        KILL: a process ends at a call boundary.
        LATE: the call in flight of a killed process takes effect later.
        CUT: power of one node: its processes end, what they had not synced may be lost or torn.
        EIO: one fsync of a file fails and its pages are dropped; a second one returns 0.
        FLIP: one bit of a file in a step folder on the remote tier flips.
        DISK: one node's disk is lost and comes back empty.
    """

    KILL = "kill"
    LATE = "late"
    CUT = "cut"
    EIO = "eio"
    FLIP = "flip"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A small world, who acts in it, and what must hold.

    Attributes:
        name: unique.
        prepare: runs first without faults; everything is durable afterwards.
        actors: one or two, concurrent.
        nodes: for each actor the node whose power cut ends it; None for a machine that stays.
        recover: everybody's second run, to the fixpoint; after it `check_final` holds.
        check: violations visible in any state, since a reader may look at any moment.
        check_final: violations after `recover`.
        faults: which kinds apply.
    """

    name: str
    prepare: Actor
    actors: tuple[Actor, ...]
    nodes: tuple[int | None, ...]
    recover: Actor
    check: Check
    check_final: Check
    faults: frozenset[Fault] = field(
        default_factory=lambda: frozenset({Fault.KILL, Fault.LATE, Fault.CUT})
    )
