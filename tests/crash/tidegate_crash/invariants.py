"""What must hold in every state of both tiers, and what must hold once everybody has finished.

Each check compares what the production reader says with what really lies there (`truth`).

I1 a sealed step whose shards all exist somewhere stays restorable or re-flushable until a newer
commit supersedes it. I2 nothing torn, mixed between attempts, or of another run is ever offered.
I3 the newest commit that somebody was told of is only ever replaced by a newer one. I4 a restore
takes the newest good commit, verifies it and gets the bytes of one attempt. I5 a second run of
everybody ends, with the newest available step committed and nothing left over. I6 a commit that a
person was told is pinned stays, in its place or on the way back to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tidegate_contract.errors import Corrupt
from tidegate_contract.folder import Folder, open_step
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import METADATA, TRASH, Part, data_file
from tidegate_contract.restore_point import Candidate, Source, decide_restore_point
from tidegate_contract.run_documents import read_identity, scan_claims, scan_pins
from tidegate_contract.scan import (
    StepRecord,
    read_commit,
    scan_step,
    scan_steps,
    verify_file,
)
from tidegate_contract.seal import FileEntry
from tidegate_crash.restoring import Job, build_world
from tidegate_crash.scenario import Check, Fact, History, Place
from tidegate_crash.stage import RANKS, SAVES, Save, local_bytes, remote_bytes, save_of
from tidegate_crash.truth import (
    Order,
    Truth,
    opened,
    read_truth,
    sealed_saves,
    told_orders,
    told_saves,
)

Entries = dict[str, FileEntry]
_ARRANGEMENTS = (Job(), Job(nodes=(1, 0)))
"""Ranks where they saved, and swapped: then nobody's local copy serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What a scenario's second run does, so what it must leave.

    Attributes:
        keep: commits that stay outside `.trash`; None where nobody tidies the remote tier.
        empties: `.trash` is emptied as well.
    """

    keep: int | None = None
    empties: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One moment, as it is and as the production reader sees it.

    Attributes:
        truth: what really lies there.
        remote, claims: of the remote tier.
        local: of each node, and the id of the run that it holds.
    """

    truth: Truth
    remote: list[StepRecord]
    claims: tuple[LineageClaim, ...]
    local: list[list[StepRecord]]
    local_ids: list[str | None]


def look(place: Place, history: History) -> Sight:
    """Reads everything once."""
    truth = read_truth(place, history)
    remote: list[StepRecord] = []
    claims: tuple[LineageClaim, ...] = ()
    if truth.run_id is not None:
        with Folder.open(place.remote) as run:
            remote = scan_steps(run, truth.run_id)
            claims = tuple(scan_claims(run, truth.run_id))
    local: list[list[StepRecord]] = []
    local_ids: list[str | None] = []
    for path in place.nodes:
        with opened(path) as run:
            identity = read_identity(run) if run is not None else None
            local_ids.append(identity.run_id if identity else None)
            local.append(scan_steps(run, identity.run_id) if run and identity else [])
    return Sight(truth=truth, remote=remote, claims=claims, local=local, local_ids=local_ids)


def check_state(place: Place, history: History) -> list[str]:
    """Violations of I1 to I4 and I6 that a reader could meet at this moment."""
    return _check(place, history, look(place, history), is_final=False)


def check_settled(settled: Settled) -> Check:
    """A check of I5, and of all others after it."""

    def check(place: Place, history: History) -> list[str]:
        sight = look(place, history)
        return [
            *_check(place, history, sight, is_final=True),
            *_check_committed(history, sight.truth),
            *_check_garbage(place, sight, settled),
        ]

    return check


def _check(place: Place, history: History, sight: Sight, *, is_final: bool) -> list[str]:
    found = [*sorted(history.complaints), *_check_remote(place, history, sight)]
    for node in range(len(place.nodes)):
        found += _check_local(place, history, sight, node)
    if sight.truth.run_id is None:
        return found
    is_flipped = bool(history.of(Fact.FLIPPED))
    found += _check_pinned(history, sight.truth, is_final=is_final)
    found += _check_told(history, sight.truth, is_final=is_final)
    if not is_flipped:
        found += _check_sealed(history, sight.truth)
    if is_final or not is_flipped:  # a flip is found by whoever reads; in the end somebody has
        found += _check_offers(place, sight)
    return found


def _check_remote(place: Place, history: History, sight: Sight) -> Iterator[str]:
    if sight.truth.run_id is None:
        return
    for whole in sight.truth.remote:
        if whole.save.run_id != sight.truth.run_id:
            yield f"I2 {_name(whole.save)} of another run came into this one's folder"
    with Folder.open(place.remote) as run:
        for record in sight.remote:
            with open_step(run, record.folder) as step:
                yield from _check_record(step, record, sight.truth.run_id, history)


def _check_record(step: Folder, record: StepRecord, run_id: str, history: History) -> Iterator[str]:
    save = save_of(record.attempt)
    if save is None or save.run_id != run_id:
        if record.committed or record.seals:
            yield f"I2 {record.folder} of another run is offered"
        return
    want = remote_bytes(save)
    names = set(want) if record.committed else set()
    for rank in record.seals:
        names |= {n for n in local_bytes(save, rank) if n in want and n != METADATA}
    yield from (
        f"I2 {record.folder} looks whole but {name} holds other bytes"
        for name in sorted(names)
        if not _is_same(step.read(name), want[name], history)
    )


def _check_local(place: Place, history: History, sight: Sight, node: int) -> Iterator[str]:
    for record in sight.local[node]:
        save = save_of(record.attempt)
        for rank in record.seals:
            if save is None or save.run_id != sight.local_ids[node]:
                yield f"I2 {record.folder} of another run is sealed on node {node}"
                continue
            with (
                Folder.open(place.nodes[node]) as run,
                open_step(run, record.folder) as step,
            ):
                for name, (data, _) in local_bytes(save, rank).items():
                    if not _is_same(step.read(name), data, history):
                        yield f"I2 {record.folder} is sealed on node {node} but {name} is torn"


def _is_same(found: bytes | None, want: bytes, history: History) -> bool:
    """Exact, or one bit away where one was flipped: only a digest tells that, to whoever reads."""
    if found == want:
        return True
    if found is None or len(found) != len(want) or not history.of(Fact.FLIPPED):
        return False
    return sum((a ^ b).bit_count() for a, b in zip(found, want, strict=True)) == 1


def _check_told(history: History, truth: Truth, *, is_final: bool) -> Iterator[str]:
    """I3. A flipped bit takes one commit, then it is the one before that must be there.

    Meanwhile a step whose shards are all there counts as well: it will be committed again. Where a
    scenario flipped the bit (the note names the attempt) that must have happened in the end.
    """
    flips = history.of(Fact.FLIPPED)
    is_mended = is_final and all(note.attempt is not None for note in flips)
    wanted = told_orders(history, truth.run_id)[: -1 if flips and not is_mended else None]
    there = [truth.newest]
    if flips and not is_final:
        there += [truth.order(save) for save in SAVES if truth.is_available(save)]
    if wanted and max(there) < wanted[-1]:
        yield f"I3 {wanted[-1]} was durable and the newest commit is {truth.newest}"


def _check_pinned(history: History, truth: Truth, *, is_final: bool) -> Iterator[str]:
    """I6."""
    there = {w.save.attempt for w in truth.commits if not (is_final and w.is_in_trash)}
    for note in history.of(Fact.PINNED):
        if note.attempt is not None and note.attempt not in there:
            yield f"I6 step {note.attempt.step} is pinned and gone"


def _check_sealed(history: History, truth: Truth) -> Iterator[str]:
    """I1."""
    lost = {note.number for note in history.of(Fact.DISK_LOST)}
    told = told_saves(history, truth.run_id)
    for save in sealed_saves(truth, history):
        if truth.newest > truth.order(save):
            continue
        for rank in RANKS:
            if not truth.has_shard(save, rank) and (rank not in lost or save in told):
                yield f"I1 the last copy of rank {rank} of {_name(save)} is gone"


def _check_offers(place: Place, sight: Sight) -> Iterator[str]:
    """I4: what a restore would take now is whole, and no older than the newest good commit."""
    truth = sight.truth
    if truth.run_id is None:
        return
    local = [
        records if known == truth.run_id else []
        for records, known in zip(sight.local, sight.local_ids, strict=True)
    ]
    for job in _ARRANGEMENTS:
        world = build_world(job, local, sight.remote, sight.claims)
        best = next(iter(decide_restore_point(world).candidates), None)
        save = save_of(best.attempt) if best else None
        order: Order = truth.order(save) if save else (0, 0)
        if order < truth.newest:
            yield f"I4 ranks on nodes {job.nodes} are offered {order}, {truth.newest} is there"
        if best is not None:
            yield from _check_readable(place, job, best, truth.run_id)


def _check_readable(place: Place, job: Job, best: Candidate, run_id: str) -> Iterator[str]:
    for rank in RANKS:
        is_local = best.sources[rank] is Source.LOCAL
        path = place.nodes[job.nodes[rank]] if is_local else place.remote
        name = best.folders[rank]
        try:
            with Folder.open(path) as run, open_step(run, name) as step:
                entries = _entries(step, best, run_id, is_local=is_local)
                for name in (METADATA, data_file(Part.WEIGHTS, rank)):
                    verify_file(step, entries[name])
        except (OSError, Corrupt, KeyError) as error:
            yield f"I4 rank {rank} is offered {name} and cannot read it: {error}"


def _entries(step: Folder, best: Candidate, run_id: str, *, is_local: bool) -> Entries:
    if is_local:
        seals = scan_step(step, best.attempt, step.path, run_id).seals.values()
        return {entry.name: entry for seal in seals for entry in seal.files}
    found = read_commit(step, best.attempt, run_id)
    return {entry.name: entry for entry in found.manifest.files} if found else {}


def _check_committed(history: History, truth: Truth) -> Iterator[str]:
    """I5: the newest step whose shards are all there is committed, where everybody looks."""
    available = [s for s in sealed_saves(truth, history) if truth.is_available(s)]
    newest = max([truth.order(save) for save in available], default=(0, 0))
    if newest > truth.newest_outside:
        yield f"I5 {newest} is sealed and stays uncommitted; the newest is {truth.newest_outside}"
    if truth.newest > truth.newest_outside:
        yield f"I5 the newest commit {truth.newest} stays in .trash"


def _check_garbage(place: Place, sight: Sight, settled: Settled) -> Iterator[str]:
    truth, records = sight.truth, sight.remote
    if settled.keep is None or truth.run_id is None:
        return
    with Folder.open(place.remote) as run:
        held = set(scan_pins(run)) | {claim.restored for claim in sight.claims[-1:]}
    outside = [r for r in records if not r.folder.startswith(f"{TRASH}/")]
    commits = [r for r in outside if r.committed and r.attempt not in held]
    if len(commits) > settled.keep:
        yield f"I5 {len(commits)} commits stay, {settled.keep} are to be kept"
    for record in (r for r in outside if r.attempt not in held):
        save = save_of(record.attempt)
        is_known = bool(record.seals or record.announced) and save is not None
        if is_known and not record.committed and save and truth.order(save) < truth.newest_outside:
            yield f"I5 {record.folder} is superseded and stays"
    if settled.empties and len(outside) < len(records):
        yield f"I5 .trash stays full: {[r.folder for r in records if r not in outside]}"


def _name(save: Save) -> str:
    return f"step {save.attempt.step} of lineage {save.lineage}"
