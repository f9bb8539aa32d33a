"""A job that restores, as one sequential process: the trainer's calls, without torch. I/O.

It mirrors `trainer/tidegate/observe.py` and `restore.py` at the level of the contract: rank 0 looks
at the remote tier and each node's first rank at its own, all decide alike, open, claim, verify,
read; a failed vote takes the next candidate together.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tidegate_contract.errors import Corrupt, DamagedFile, TidegateError
from tidegate_contract.folder import Folder, open_step
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import (
    METADATA,
    TRASH,
    Attempt,
    Part,
    data_file,
)
from tidegate_contract.publish import claim_lineage, commit_step, set_aside
from tidegate_contract.restore_point import (
    Candidate,
    Copy,
    RestorePoint,
    Source,
    World,
    copy_of,
    decide_restore_point,
    next_lineage,
)
from tidegate_contract.run_documents import read_identity, scan_claims
from tidegate_contract.scan import (
    StepRecord,
    read_commit,
    scan_step,
    scan_steps,
    verify_file,
)
from tidegate_contract.seal import FileEntry
from tidegate_crash.scenario import Actor, Fact, History, Place
from tidegate_crash.stage import NOW, RANKS, local_bytes, remote_bytes, save_of
from tidegate_crash.truth import merge_claims, newest_told, noted_rollbacks, opened, order_of

_MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Who restores what.

    Attributes:
        nodes: for each rank the node that it runs on now.
        step: a person named it: restore exactly this one, and order it anew; None takes the newest.
    """

    nodes: tuple[int, ...] = RANKS
    step: int | None = None


def observe_world(place: Place, job: Job, run_id: str) -> World:
    """What all ranks see; attempts that only lack their COMMIT get it first."""
    local = []
    for node in sorted(set(job.nodes)):
        with opened(place.nodes[node]) as run:
            local.append([] if run is None else scan_steps(run, run_id))
    with Folder.open(place.remote) as run:
        records = [_commit_if_ready(run, record, run_id) for record in scan_steps(run, run_id)]
        return build_world(job, local, records, tuple(scan_claims(run, run_id)))


def build_world(
    job: Job,
    local: list[list[StepRecord]],
    remote: list[StepRecord],
    claims: tuple[LineageClaim, ...],
) -> World:
    """The world of a job; `local` has one item for each of its nodes, in their order."""
    nodes = sorted(set(job.nodes))
    return World(
        nodes=tuple(frozenset(r for r in RANKS if job.nodes[r] == node) for node in nodes),
        local=tuple(copies_of(records) for records in local),
        remote=copies_of(remote),
        claims=claims,
        step=job.step,
    )


def copies_of(records: list[StepRecord]) -> tuple[Copy, ...]:
    """The copies in scanned folders."""
    return tuple(copy for record in records if (copy := copy_of(record)) is not None)


def _commit_if_ready(run: Folder, record: StepRecord, run_id: str) -> StepRecord:
    is_ready = record.committed is None and record.seals and record.is_sealed_by_all
    if not is_ready or record.folder.startswith(f"{TRASH}/"):
        return record
    try:
        with open_step(run, record.folder) as step:
            commit_step(step, record.attempt, run_id, NOW)
            return scan_step(step, record.attempt, record.folder, run_id)
    except (OSError, Corrupt):
        return record


class _Restore:
    def __init__(self, place: Place, history: History, job: Job, run_id: str) -> None:
        self._place = place
        self._history = history
        self._job = job
        self._run_id = run_id
        self._unreadable: set[tuple[Attempt, tuple[str, ...]]] = set()
        self._failed_local: dict[tuple[int, Attempt], str] = {}
        self._world = self._observe()

    def _observe(self) -> World:
        world = observe_world(self._place, self._job, self._run_id)
        return replace(world, failed_local=dict(self._failed_local))

    def run(self) -> None:
        promised = newest_told(self._history, self._run_id)
        for _ in range(_MAX_ROUNDS):
            point = decide_restore_point(self._world)
            candidate = next((c for c in point.candidates if not self._has_failed(c)), None)
            if candidate is None:
                return self._give_up(point, promised)
            if self._try(candidate):
                return self._finish(candidate, promised)
            self._world = self._observe()
        self._history.complain("I4 a restore finds no end")
        return None

    def _has_failed(self, candidate: Candidate) -> bool:
        """A step that lies elsewhere now was moved while it was opened, and is tried again."""
        return (candidate.attempt, candidate.folders) in self._unreadable

    def _rolled_back(self) -> dict[Attempt, int]:
        """By what was told, and by the claims that this job saw, told or not."""
        return merge_claims(noted_rollbacks(self._history), self._world.claims)

    def _give_up(self, point: RestorePoint, promised: tuple[int, int]) -> None:
        """Right only where nobody was told of a commit; a step that is named may be gone."""
        if promised > (0, 0) and self._job.step is None and not self._history.of(Fact.REMOVED):
            told = ", ".join(f"{attempt.step}: {why}" for attempt, why in point.refused)
            self._history.complain(f"I4 a restore gives up although {promised} is durable ({told})")

    def _try(self, candidate: Candidate) -> bool:
        """False if any rank fails: then the next candidate is taken, by all together."""
        with ExitStack() as stack:
            steps, entries = [], []
            for rank in RANKS:
                try:
                    steps.append(stack.enter_context(self._open(candidate, rank)))
                    entries.append(self._entries(steps[rank], candidate, rank))
                except (OSError, Corrupt) as error:
                    return self._fail(candidate, rank, str(error))
            self._claim(candidate.attempt)
            for rank in RANKS:
                try:
                    got = dict(_read(steps[rank], entries[rank], rank))
                except DamagedFile as error:
                    return self._set_aside(candidate, rank, error.entry)
                except (OSError, TidegateError) as error:
                    return self._fail(candidate, rank, str(error))
                self._judge(candidate, rank, got)
        return True

    def _fail(self, candidate: Candidate, rank: int, why: str) -> bool:
        """A node's own copy is left out first, as the remote one may do."""
        if candidate.sources[rank] is Source.LOCAL:
            node = next(i for i, ranks in enumerate(self._world.nodes) if rank in ranks)
            self._failed_local[node, candidate.attempt] = why
        else:
            self._unreadable.add((candidate.attempt, candidate.folders))
        return False

    def _open(self, candidate: Candidate, rank: int) -> Folder:
        with Folder.open(self._run_of(candidate, rank)) as run:
            return open_step(run, candidate.folders[rank])

    def _run_of(self, candidate: Candidate, rank: int) -> str:
        is_local = candidate.sources[rank] is Source.LOCAL
        return self._place.nodes[self._job.nodes[rank]] if is_local else self._place.remote

    def _entries(self, step: Folder, candidate: Candidate, rank: int) -> dict[str, FileEntry]:
        if candidate.sources[rank] is Source.LOCAL:
            seals = scan_step(step, candidate.attempt, step.path, self._run_id).seals.values()
            entries = {entry.name: entry for seal in seals for entry in seal.files}
        else:
            found = read_commit(step, candidate.attempt, self._run_id)
            entries = {entry.name: entry for entry in found.manifest.files} if found else {}
        if METADATA not in entries:
            raise Corrupt(f"{step.path}: is no whole copy any more")
        return entries

    def _claim(self, attempt: Attempt) -> None:
        number = next_lineage(self._world.copies, self._world.claims)
        with Folder.open(self._place.remote) as run:
            while not claim_lineage(run, self._claim_of(number, attempt)):
                number += 1
        if self._job.step is not None:
            self._history.note(Fact.ROLLED_BACK, attempt, number)

    def _claim_of(self, number: int, attempt: Attempt) -> LineageClaim:
        return LineageClaim(
            run_id=self._run_id,
            number=number,
            restored=attempt,
            explicit=self._job.step is not None,
            claimed_at=NOW,
        )

    def _set_aside(self, candidate: Candidate, rank: int, entry: FileEntry) -> bool:
        """Another look finds other candidates, whoever of several readers moved the file."""
        try:
            with (
                Folder.open(self._run_of(candidate, rank)) as run,
                open_step(run, candidate.folders[rank]) as step,
            ):
                set_aside(run, step, candidate.attempt, entry)
        except FileNotFoundError:
            return False
        except (OSError, Corrupt) as error:
            return self._fail(candidate, rank, str(error))
        return False

    def _judge(self, candidate: Candidate, rank: int, got: dict[str, bytes]) -> None:
        """The bytes in memory are those of the one attempt that was chosen, of this run."""
        save = save_of(candidate.attempt)
        if save is None or save.run_id != self._run_id:
            self._history.complain(f"I2 a restore reads another run's step {candidate.attempt}")
            return
        far = remote_bytes(save)
        near = {name: data for name, (data, _) in local_bytes(save, rank).items()}
        want = near if candidate.sources[rank] is Source.LOCAL else far
        for name, data in got.items():
            if data != want[name]:
                self._history.complain(
                    f"I4 a restore of step {candidate.attempt.step} reads other bytes of {name}"
                )

    def _finish(self, candidate: Candidate, promised: tuple[int, int]) -> None:
        save = save_of(candidate.attempt)
        order = order_of(save, self._rolled_back()) if save else (0, 0)
        is_excused = self._job.step is not None or bool(self._history.of(Fact.FLIPPED))
        if order < promised and not is_excused:
            self._history.complain(f"I4 a restore returns {order} although {promised} is durable")
        self._history.note(Fact.RESTORED, candidate.attempt)


def _read(step: Folder, entries: dict[str, FileEntry], rank: int) -> Iterator[tuple[str, bytes]]:
    """The files that a rank needs, verified before they are read."""
    needed = (METADATA, data_file(Part.WEIGHTS, rank))
    for name in needed:
        entry = entries.get(name)
        if entry is None:
            raise Corrupt(f"{step.path}/{name}: no seal declares it")
        try:
            verify_file(step, entry)
        except Corrupt as error:
            raise DamagedFile(str(error), entry) from error
    for name in needed:
        data = step.read(name)
        if data is None:
            raise FileNotFoundError(f"{step.path}/{name}: gone since it was verified")
        yield name, data


def restore(job: Job | None = None) -> Actor:
    """A process that restores once; what it must never see it complains of."""
    chosen = job or Job()

    def actor(place: Place, history: History) -> None:
        with Folder.open(place.remote) as run:
            found = read_identity(run)
        if found is not None:
            _Restore(place, history, chosen, found.run_id).run()

    return actor
