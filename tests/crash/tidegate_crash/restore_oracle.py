"""A brute-force oracle of which step is restored, and a restore by production's decision. Pure.

The oracle is written from the format's rules, not from the code: it looks at files, which `World`
does not show, and tries every way in which the ranks could read. The restore sees what a scan sees
and learns of damage as a real one does: candidate, vote, move the damaged file, look again.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import product
from typing import Any, NamedTuple

from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import TRASH, Attempt, step_folder
from tidegate_contract.restore_point import (
    Candidate,
    Copy,
    RestorePoint,
    Source,
    World,
    decide_restore_point,
)

GOOD, MISSING, CORRUPT, OTHER = "good", "missing", "corrupt", "of another attempt"
ABSENT, PARTIAL, ANNOUNCED, COMMITTED, TRASHED = "absent", "partial", "announced", "commit", "trash"


class Save(NamedTuple):
    """One attempt as it really lies there.

    `home` is the disk of each rank when it saved, `near` its shard there, `far` its file on the
    remote tier, `mark` what stands in the folder there.
    """

    attempt: Attempt
    lineage: int
    home: tuple[int, ...]
    near: tuple[str, ...]
    far: tuple[str, ...]
    mark: str


class Case(NamedTuple):
    """`now` is the disk of each rank that restores; `rollbacks` are (lineage, attempt) claims."""

    saves: tuple[Save, ...]
    now: tuple[int, ...]
    is_readable: bool = True
    rollbacks: tuple[tuple[int, Attempt], ...] = ()
    step: int | None = None


def expand(case: Case) -> Case:
    """A shard of another attempt is a good one, of an attempt that nobody completed."""
    saves = []
    for save in case.saves:
        is_other = [state == OTHER for state in save.near]
        near = tuple(MISSING if state == OTHER else state for state in save.near)
        saves.append(save._replace(near=near))
        if any(is_other):
            strange = tuple(GOOD if other else MISSING for other in is_other)
            attempt = Attempt(step=save.attempt.step, nonce=f"f{save.attempt.nonce[1:]}")
            none = (MISSING,) * len(save.far)
            saves.append(save._replace(attempt=attempt, near=strange, far=none, mark=ABSENT))
    return case._replace(saves=tuple(saves))


def rank_can_read(case: Case, save: Save, rank: int, tier: str) -> bool:
    """Whether this rank finds, undamaged, all that it needs.

    On a node: the files of all ranks that shared that node, if it was one of them, or all files. On
    the remote tier of a committed step: its own file and rank 0's, which holds what is shared. Of
    another number of ranks' step it needs all files, as anything may lie anywhere.
    """
    is_same_size = len(case.now) == len(save.home)
    if tier == "remote":
        is_commit = save.mark in (COMMITTED, TRASHED) and MISSING not in save.far
        needed = {save.far[rank], save.far[0]} if is_same_size else set(save.far)
        return case.is_readable and is_commit and needed == {GOOD}
    here = [q for q in range(len(save.home)) if save.home[q] == case.now[rank]]
    is_whole = len(here) == len(save.home)
    has_own = is_same_size and rank in here
    return (has_own or is_whole) and all(save.near[q] == GOOD for q in here)


def can_restore(case: Case, save: Save) -> bool:
    """Whether there is any way in which all ranks can read this attempt."""
    ranks = range(len(case.now))
    return any(
        all(rank_can_read(case, save, rank, tiers[rank]) for rank in ranks)
        for tiers in product(("local", "remote"), repeat=len(case.now))
    )


def age(case: Case, save: Save) -> tuple[int, int, str]:
    """What a person named is ordered as (lineage of the claim, its step) from then on."""
    dates = [number for number, attempt in case.rollbacks if attempt == save.attempt]
    return (max([save.lineage, *dates]), save.attempt.step, save.attempt.nonce)


def oracle(case: Case) -> Attempt | None:
    """The newest attempt that can be restored; None where there is none."""
    allowed = [s for s in case.saves if case.step is None or s.attempt.step == case.step]
    newest = max(
        (s for s in allowed if can_restore(case, s)), key=lambda s: age(case, s), default=None
    )
    return newest.attempt if newest else None


def awaited(case: Case, offered: Attempt | None) -> Attempt | None:
    """The newest attempt that all announced and whose files may still come.

    None if `offered` is newer. A commit that lost a file counts: who holds it copies it again.
    """
    for save in sorted(case.saves, key=lambda s: age(case, s), reverse=True):
        is_commit = save.mark == COMMITTED and MISSING not in save.far
        is_asked = case.step in (None, save.attempt.step)
        if save.attempt == offered:
            return None
        if is_asked and case.is_readable and save.mark in (ANNOUNCED, COMMITTED) and not is_commit:
            return save.attempt
    return None


def observe(case: Case, failed: dict[tuple[int, Attempt], str]) -> World:
    """What scans of all tiers show of it: no damage that was not read yet, no former neighbours."""
    disks = sorted(set(case.now))
    nodes = tuple(frozenset(r for r, at in enumerate(case.now) if at == disk) for disk in disks)
    return World(
        nodes=nodes,
        local=tuple(tuple(_near_copies(case, disk)) for disk in disks),
        remote=tuple(_far_copies(case)) if case.is_readable else None,
        claims=tuple(_claim(number, attempt) for number, attempt in case.rollbacks),
        step=case.step,
        failed_local=failed,
    )


def _claim(number: int, attempt: Attempt) -> LineageClaim:
    now = datetime(2026, 11, 29, tzinfo=UTC)
    return LineageClaim(run_id="r", number=number, restored=attempt, explicit=True, claimed_at=now)


def _copy(save: Save, ranks: frozenset[int], **changes: Any) -> Copy:
    fields: dict[str, Any] = {"folder": step_folder(save.attempt)} | changes
    return Copy(
        attempt=save.attempt,
        lineage=save.lineage,
        tokens=save.attempt.step,
        world_size=len(save.home),
        ranks=ranks,
        **fields,
    )


def _near_copies(case: Case, disk: int) -> Iterator[Copy]:
    for save in case.saves:
        here = [q for q, at in enumerate(save.home) if at == disk]
        ranks = frozenset(q for q in here if save.near[q] != MISSING)
        if ranks:
            yield _copy(save, ranks)


def _far_copies(case: Case) -> Iterator[Copy]:
    for save in case.saves:
        if save.mark == ABSENT:
            continue
        there = frozenset(q for q, state in enumerate(save.far) if state != MISSING)
        is_commit = save.mark in (COMMITTED, TRASHED) and MISSING not in save.far
        folder = step_folder(save.attempt)
        yield _copy(
            save,
            there,
            is_committed=is_commit,
            is_announced=save.mark != PARTIAL,
            folder=f"{TRASH}/{folder}" if save.mark == TRASHED else folder,
        )


def _needs(case: Case, save: Save, rank: int, source: Source) -> list[int]:
    if source is Source.REMOTE:
        is_same_size = len(case.now) == len(save.home)
        return sorted({0, rank}) if is_same_size else list(range(len(save.home)))
    return [q for q, at in enumerate(save.home) if at == case.now[rank]]


def _vote(case: Case, save: Save, candidate: Candidate) -> tuple[set[tuple[str, int]], set[int]]:
    """Damaged files that were met, and ranks that could not read for another reason."""
    damaged, stuck = set(), set()
    for rank, source in enumerate(candidate.sources):
        tier = "remote" if source is Source.REMOTE else "local"
        files = save.far if tier == "remote" else save.near
        needed = _needs(case, save, rank, source)
        met = {(tier, q) for q in needed if files[q] == CORRUPT}
        damaged |= met
        if not met and not rank_can_read(case, save, rank, tier):
            stuck.add(rank)
    return damaged, stuck


def _set_aside(case: Case, save: Save, damaged: set[tuple[str, int]]) -> Case:
    def after(tier: str, files: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(MISSING if (tier, q) in damaged else state for q, state in enumerate(files))

    new = save._replace(near=after("local", save.near), far=after("remote", save.far))
    return case._replace(saves=tuple(new if s is save else s for s in case.saves))


def restore(case: Case) -> tuple[Candidate | None, RestorePoint]:
    """What is restored in the end, and the decision at the first look."""
    failed: dict[tuple[int, Attempt], str] = {}
    first = None
    for _ in range(8 * len(case.saves) * len(case.now) + 1):
        world = observe(case, failed)
        point = decide_restore_point(world)
        first = first or point
        if not point.candidates:
            return None, first
        chosen = point.candidates[0]
        save = next(s for s in case.saves if s.attempt == chosen.attempt)
        damaged, stuck = _vote(case, save, chosen)
        if not damaged and not stuck:
            return chosen, first
        case = _set_aside(case, save, damaged)
        near = {r for r in stuck if chosen.sources[r] is Source.LOCAL}
        assert near == stuck, "what a scan shows as a commit fails only by damage"
        for node, ranks in enumerate(world.nodes):
            if ranks & near:
                failed[node, chosen.attempt] = "not whole"
    raise AssertionError(f"no end: {case}")


def check(case: Case) -> None:
    """Fails unless the restore takes the oracle's step, waits and reads from where it should."""
    case = expand(case)
    chosen, first = restore(case)
    got, want = chosen and chosen.attempt, oracle(case)
    assert got == want, f"{case}: restored {got}, newest restorable is {want}"
    offered = first.candidates[0].attempt if first.candidates else None
    assert first.pending == awaited(case, offered), f"{case}: waits for {first.pending}"
    if chosen is None:
        return
    save = next(s for s in case.saves if s.attempt == got)
    for rank, source in enumerate(chosen.sources):
        is_near = rank_can_read(case, save, rank, "local")
        assert (source is Source.LOCAL) == is_near, f"{case}: rank {rank} reads {source}"
        assert chosen.folders[rank].endswith(step_folder(save.attempt))
