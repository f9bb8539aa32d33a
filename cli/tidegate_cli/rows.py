"""One row for each attempt of a run, over all folders that were looked at, and why it is so. Pure.

Called by `ls`. What counts comes from the contract's records; here they are put into words.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from tidegate_cli.look import RunView, is_in_trash, lineage_of
from tidegate_cli.terminal import show_ranks
from tidegate_contract.identity import LineageClaim, Pin
from tidegate_contract.layout import Attempt
from tidegate_contract.restore_point import find_base
from tidegate_contract.scan import StepRecord
from tidegate_contract.seal import Manifest, Seal


class State(StrEnum):
    """What a step is, best first."""

    DURABLE = "durable"
    SEALED = "sealed"
    INCOMPLETE = "incomplete"
    EMPTY = "empty"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One folder of an attempt.

    Attributes:
        path: of the run's folder it lies in.
        record: what it holds.
        is_newer: nothing is wrong with it but that a newer release wrote it.
    """

    path: str
    record: StepRecord
    is_newer: bool

    @property
    def is_damaged(self) -> bool:
        """Something is not as it was declared."""
        return bool(self.record.problems) and not self.is_newer


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One attempt.

    Attributes:
        attempt, state: which, and what it is.
        why: sentences, the most telling first; empty when the state says it all.
        lineage, tokens, world_size, saved_at: as its documents say; None where none can be read.
        size_bytes: of the files that belong on the remote tier, as far as any document tells.
        committed_at: of the commit; None while it is not durable.
        pin: of the attempt; its document may be unreadable, then `is_pinned` alone says so.
        is_newest: the newest durable one.
        ranks: whose files are whole in at least one folder outside `.trash`.
        local_ranks: the same, in the folders given as local ones.
        held: its folders.
    """

    attempt: Attempt
    state: State
    why: tuple[str, ...]
    lineage: int | None
    tokens: int | None
    world_size: int | None
    saved_at: datetime | None
    size_bytes: int
    committed_at: datetime | None
    is_pinned: bool
    pin: Pin | None
    is_newest: bool
    ranks: frozenset[int]
    local_ranks: frozenset[int]
    held: tuple[Held, ...]


def build_rows(main: RunView, locals_: Sequence[RunView]) -> list[Row]:
    """Rows of a run, newest first; an attempt in `.trash` and outside makes one row.

    Args:
        main: the folder that the person asked about, of either tier.
        locals_: folders of the same run on nodes.
    """
    held: dict[Attempt, list[Held]] = {}
    for view in (main, *locals_):
        for record in view.records:
            is_newer = record.folder in view.newer
            one = Held(path=view.path, record=record, is_newer=is_newer)
            held.setdefault(record.attempt, []).append(one)
    newest = find_newest(main)
    rows = [_row(main, copies, newest) for copies in held.values()]
    order = {row.attempt: max(main.key(held.record) for held in row.held) for row in rows}
    return sorted(rows, key=lambda row: order[row.attempt], reverse=True)


def find_newest(main: RunView) -> StepRecord | None:
    """The newest commit outside `.trash`, by (lineage, step)."""
    commits = [record for record in main.records if record.committed and not is_in_trash(record)]
    return max(commits, key=main.key, default=None)


def find_base_of(main: RunView) -> LineageClaim | None:
    """As `restore_point.find_base`, of a run's folder."""
    newest = find_newest(main)
    return find_base(main.claims, main.key(newest)[0] if newest else None)


def _row(main: RunView, held: list[Held], newest: StepRecord | None) -> Row:
    attempt = held[0].record.attempt
    live = [one for one in held if not is_in_trash(one.record)]
    head = _head([one.record for one in live or held])
    world = head.world_size if head else 0
    ranks = _ranks(live)
    state = _state(main.path, held, live, is_whole=0 < world == len(ranks))
    commit = next((one.record.committed for one in held if one.record.committed), None)
    is_newest = newest is not None and newest.attempt == attempt
    row = Row(
        attempt=attempt,
        state=state,
        why=(),
        lineage=head.lineage if head else None,
        tokens=head.tokens if head else None,
        world_size=head.world_size if head else None,
        saved_at=head.sealed_at if head else None,
        size_bytes=_size_bytes(live or held),
        committed_at=commit.commit.committed_at if commit else None,
        is_pinned=attempt in main.pins,
        pin=main.pins.get(attempt),
        is_newest=is_newest,
        ranks=ranks,
        local_ranks=_ranks([one for one in live if one.path != main.path]),
        held=tuple(held),
    )
    return _with_why(row, main, newest)


def _head(records: Iterable[StepRecord]) -> Manifest | Seal | None:
    for record in records:
        if record.committed is not None:
            return record.committed.manifest
        known = record.announced | record.seals
        if known:
            return known[min(known)]
    return None


def _ranks(held: Iterable[Held]) -> frozenset[int]:
    return frozenset(rank for one in held for rank in one.record.seals)


def _size_bytes(held: Sequence[Held]) -> int:
    for one in held:
        if one.record.committed is not None:
            return one.record.committed.manifest.size_bytes
    seals: dict[int, Seal] = {}
    for one in held:
        seals |= one.record.announced | one.record.seals
    return sum(entry.size for seal in seals.values() for entry in seal.flushed_files)


def _state(path: str, held: list[Held], live: list[Held], *, is_whole: bool) -> State:
    main = [one for one in live if one.path == path]
    if any(one.record.committed for one in main):
        return State.DURABLE
    if any(is_in_trash(one.record) for one in held if one.path == path) and not main:
        return State.DROPPED
    if any(one.record.problems for one in main):
        return _refused(main)
    if is_whole:
        return State.SEALED
    if any(one.record.problems for one in live):
        return _refused(live)
    is_known = any(one.record.announced or one.record.seals for one in live)
    return State.INCOMPLETE if is_known else State.EMPTY


def _refused(held: Iterable[Held]) -> State:
    return State.DAMAGED if any(one.is_damaged for one in held) else State.UNKNOWN


def _with_why(row: Row, main: RunView, newest: StepRecord | None) -> Row:
    why = [
        *([_pin_sentence(row.pin)] if row.is_pinned else []),
        *_claim_sentences(row.attempt, main),
        *_state_sentences(row, main, newest),
        *(problem for one in row.held for problem in one.record.problems),
        *(f"quarantine/{name} was damaged" for name in main.quarantined.get(row.attempt, ())),
    ]
    return replace(row, why=tuple(why))


def _pin_sentence(pin: Pin | None) -> str:
    if pin is None:
        return "pinned; the pin's document is damaged, which holds all the same"
    return f"pinned: {pin.reason}" if pin.reason else "pinned"


def _claim_sentences(attempt: Attempt, main: RunView) -> list[str]:
    named = [c.number for c in main.claims if c.explicit and c.restored == attempt]
    base = find_base_of(main)
    is_base = base is not None and base.restored == attempt
    return [
        *(f"named by an explicit restore: counts as of lineage {n}" for n in named[-1:]),
        *([f"lineage {base.number} goes on from it"] if base is not None and is_base else []),
    ]


def _state_sentences(row: Row, main: RunView, newest: StepRecord | None) -> list[str]:
    match row.state:
        case State.DURABLE:
            return ["the newest durable step"] if row.is_newest else []
        case State.DROPPED:
            is_sound = any(one.record.committed for one in row.held)
            end = "; a restore may still take it" if is_sound else ""
            return [f"in .trash for an hour since it was moved there{end}"]
        case State.EMPTY:
            return ["no seal yet: it is being written, or its save died"]
        case State.UNKNOWN:
            return ["a newer release wrote it"]
        case State.SEALED | State.INCOMPLETE | State.DAMAGED:
            return _superseded(row, main, newest) or _delivery(row, main)


def _superseded(row: Row, main: RunView, newest: StepRecord | None) -> list[str]:
    if newest is None or max(main.key(one.record) for one in row.held) > main.key(newest):
        return []
    return [f"superseded by step {newest.attempt.step}, which is durable"]


def _delivery(row: Row, main: RunView) -> list[str]:
    """Which ranks' files are missing, and what will bring them."""
    everybody = frozenset(range(row.world_size or 0))
    records = [one.record for one in row.held if one.path == main.path]
    announced = frozenset(rank for record in records for rank in record.announced)
    here = frozenset(rank for record in records for rank in record.seals)
    if announced and here == everybody and row.state is State.SEALED:
        return ["every rank delivered; the next flush or restore commits it"]
    sentences = []
    if missing := everybody - row.ranks - announced:
        sentences.append(f"{show_ranks(missing)} of {row.world_size} are not in these folders")
    if coming := announced - here:
        sentences.append(f"{show_ranks(coming)} of {row.world_size} announced, not delivered yet")
    if silent := row.local_ranks - here - announced:
        sentences.append(f"{show_ranks(silent)} sealed on their nodes, not copied yet")
    return sentences


def find_lineage(view: RunView) -> int:
    """The highest lineage that anything in the folder tells of; 0 if nothing does."""
    sealed = [lineage_of(record) for record in view.records]
    return max([0, *sealed, *(claim.number for claim in view.claims)])
