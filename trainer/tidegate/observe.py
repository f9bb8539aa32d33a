"""What both tiers hold when a trainer starts, and the four writes that a restore makes there.

`restore` calls these on all ranks, inside collective calls; `note_trained_behind` follows once
training goes on. The remote tier is touched by rank 0 only, on a thread with a deadline.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from tidegate.deadline import run_within
from tidegate.site import Site, open_known, open_place
from tidegate_contract.errors import Corrupt, Retry, TidegateError
from tidegate_contract.folder import Folder, open_step
from tidegate_contract.identity import LineageClaim, Trained
from tidegate_contract.layout import QUARANTINE, TRASH, Attempt, parse_quarantined_file, step_folder
from tidegate_contract.publish import claim_lineage, commit_step, note_trained
from tidegate_contract.restore_point import (
    Copy,
    World,
    copy_of,
    find_failed_tries,
    merge_claims,
    next_lineage,
)
from tidegate_contract.run_documents import scan_claims, scan_trained
from tidegate_contract.scan import (
    NO_FOLDER,
    StepRecord,
    confirm_commit,
    scan_step,
    scan_steps,
)

_LOG = logging.getLogger(__name__)
_MAX_CLAIMS = 100
_POLL_SECONDS = 1.0
_NOTE_WAITS_SECONDS = (0.0, 5.0, 60.0, 300.0)
"""Before each try to say that training goes on; a tier that hangs costs one thread per try."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one rank saw.

    Attributes:
        local: copies of its node, from the node's first rank; None from the others.
        remote: copies on the remote tier, from rank 0; None from the others, or where the tier
            could not be read. Empty where there is no remote tier.
        claims: on the local tier of its node, from the node's first rank: mirrors, and what was
            claimed without the remote tier.
        remote_claims: on the remote tier, from rank 0.
        trained: lineages whose restore came back to training, by a word on either tier.
        damaged: attempts that were or may be checkpoints and cannot be judged → why: a file of them
            lies in quarantine, or nothing in their folder can be read.
    """

    local: tuple[Copy, ...] | None = None
    remote: tuple[Copy, ...] | None = None
    claims: tuple[LineageClaim, ...] = ()
    remote_claims: tuple[LineageClaim, ...] = ()
    trained: frozenset[int] = frozenset()
    damaged: Mapping[Attempt, str] = field(default_factory=dict)


def observe_tiers(site: Site) -> View:
    """This rank's part of the view.

    Raises:
        Retry: the remote tier cannot be read and the policy makes that an error.
        OSError: the local tier cannot be read.
        Corrupt, Reject: a lineage claim cannot be read.
    """
    run_id = site.identity.run_id
    if not site.is_first_of_node:
        return View()
    with open_place(site.settings.local) as run:
        near = _look_near(run, run_id)
    if site.rank != 0:
        return near
    if site.settings.remote is None:
        return replace(near, remote=())
    try:
        far = on_remote(site, "reading", lambda far: _look_far(far, run_id))
    except (OSError, Retry) as error:
        if site.settings.policy.remote_unreachable_is_error:
            raise Retry(f"remote tier cannot be read: {error}") from error
        _LOG.warning("restoring without the remote tier", extra={"error": str(error)})
        return near
    return replace(
        near,
        remote=far.remote,
        remote_claims=far.remote_claims,
        trained=far.trained | near.trained,
        damaged={**near.damaged, **far.damaged},
    )


def build_world(site: Site, views: Sequence[View]) -> World:
    """What all ranks saw together, the same on each of them. Pure.

    Args:
        site: of any rank.
        views: of all ranks, in their order.
    """
    nodes = site.topology.nodes
    return World(
        nodes=nodes,
        local=tuple(views[min(ranks)].local or () for ranks in nodes),
        remote=views[0].remote,
        claims=merge_claims(views[0].remote_claims, *(view.claims for view in views)),
        trained=frozenset(number for view in views for number in view.trained),
        max_tries=site.settings.policy.max_restore_tries,
    )


def on_remote(
    site: Site, what: str, action: Callable[[Folder], T], within_seconds: float | None = None
) -> T:
    """Runs `action` on the run's open remote folder, on a thread of its own.

    Args:
        site: of this rank.
        what: for the sentence.
        action: gets the open folder.
        within_seconds: how long to wait; None means the policy's stall timeout.

    Raises:
        Retry: it did not end in time, or the folder is not this run's: nothing may be concluded
            from the empty mount point of a tier that is away.
        Exception: whatever `action` raised.
    """
    place = site.settings.remote
    assert place is not None, "callers ask only where there is a remote tier"

    def work() -> T:
        run, found = open_known(place)
        with run:
            if found.run_id != site.identity.run_id:
                raise Retry(f"{place.path} holds another run of this name: {found.run_id}")
            return action(run)

    seconds = within_seconds or site.settings.policy.stall_timeout_seconds
    return run_within(seconds, f"{what} {place.path}", work)


def poll_commit(site: Site, attempt: Attempt) -> bool:
    """Waits, up to the policy's time, for the commit of an announced step; commits it if it can."""
    run_id = site.identity.run_id
    limit = site.settings.policy.wait_for_flush_seconds
    until = time.monotonic() + limit
    _LOG.warning("waiting up to %.0f s until step %d is durable", limit, attempt.step)
    while True:
        try:
            if on_remote(site, "committing on", lambda run: _commit(run, attempt, run_id)):
                return True
        except (OSError, TidegateError) as error:
            _LOG.info("not committed yet", extra={"step": attempt.step, "error": str(error)})
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)


def is_durable(site: Site, attempt: Attempt, within_seconds: float | None = None) -> bool:
    """Whether the attempt's commit is on the remote tier, made durable by the asking.

    Raises:
        Retry: the tier does not answer.
        OSError, TidegateError: the commit cannot be read.
    """
    return on_remote(
        site,
        "reading",
        lambda run: _confirm(run, attempt, site.identity.run_id),
        within_seconds,
    )


def claim_next(site: Site, world: World, attempt: Attempt | None) -> LineageClaim:
    """Claims the next lineage for a restore of `attempt`; rank 0 only.

    It lies on the remote tier, or on this node where the remote one could not be read.

    Raises:
        Retry: other restores took all numbers that were tried, or the tier does not answer.
    """
    first = next_lineage(world.copies, world.claims)
    tries = find_failed_tries(world)
    for number in range(first, first + _MAX_CLAIMS):
        claim = LineageClaim(
            run_id=site.identity.run_id,
            number=number,
            restored=attempt,
            explicit=attempt is not None and world.step is not None,
            tries=0 if attempt is None else tries.get(attempt, 0),
            claimed_at=datetime.now(UTC),
        )
        write = partial(claim_lineage, claim=claim)
        if _among_claims(site, "claiming on", write, is_remote=world.remote is not None):
            return claim
    raise Retry(f"no lineage between {first} and {number} could be claimed")


def mirror_claim(site: Site, claim: LineageClaim) -> None:
    """Copies rank 0's claim to this node's local tier; each node's first rank, main thread.

    A restore without the remote tier then knows what was claimed there, and a claim that is damaged
    there is still known here. Never raises: without the mirror the restore is as good.
    """
    try:
        with open_place(site.settings.local) as run:
            claim_lineage(run, claim)
    except (OSError, TidegateError) as error:
        told = {"lineage": claim.number, "error": str(error)}
        _LOG.warning("the claim has no mirror on this node", extra=told)


def note_trained_behind(
    site: Site, claim: LineageClaim, *, is_remote: bool
) -> threading.Thread | None:
    """Says that the restore of a lineage came back to training; all ranks, after the first step.

    Where there is no claim on the remote tier, each node has a mirror, and says it: any of them may
    be replaced. Never raises, never waits: without the word the restore is a failed try, no more.

    Args:
        site: of this rank.
        claim: of the restore.
        is_remote: the claim lies on the remote tier; without such a tier it lies on the nodes.

    Returns:
        The thread that writes it; None if there could be none, or others say it.
    """
    is_on_nodes = not is_remote or site.settings.remote is None
    if not (site.is_first_of_node if is_on_nodes else site.rank == 0):
        return None
    word = Trained(
        run_id=claim.run_id,
        number=claim.number,
        restored=claim.restored,
        explicit=claim.explicit,
        trained_at=datetime.now(UTC),
    )
    work = partial(_note_trained, site, word, is_remote=is_remote)
    thread = threading.Thread(target=work, name="tidegate-trained", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the limit of threads; training goes on
        _LOG.warning("no thread to note that training goes on", extra={"error": str(error)})
        return None
    return thread


def _note_trained(site: Site, word: Trained, *, is_remote: bool) -> None:
    why = ""
    for seconds in _NOTE_WAITS_SECONDS:
        time.sleep(seconds)
        try:
            _among_claims(site, "noting on", partial(note_trained, word=word), is_remote=is_remote)
            return
        except (OSError, TidegateError) as error:
            why = str(error)
    _LOG.warning("not noted that training goes on: %s", why, extra={"lineage": word.number})


def _among_claims(
    site: Site, what: str, write: Callable[[Folder], bool], *, is_remote: bool
) -> bool:
    if is_remote and site.settings.remote is not None:
        return on_remote(site, what, write)
    with open_place(site.settings.local) as run:
        return write(run)


def find_existing_attempts(world: World, *, claimed: Collection[int] | None) -> set[Attempt]:
    """Attempts that count as checkpoints: starting from nothing would lose them.

    Those that all their ranks sealed, as far as anything tells. And those of which a node holds a
    seal, as the others' may have been lost with their nodes or with the remote tier; unless the
    remote tier was read, knows their lineage, and nothing was ever announced there: then a first
    save was torn.

    Args:
        world: what all ranks saw.
        claimed: lineages with a claim on the remote tier; None where there is no such tier. Mirrors
            do not count: the tier that they were made from may be lost.
    """
    ranks: dict[Attempt, set[int]] = {}
    existing: set[Attempt] = set()
    for copy in world.copies:
        seen = ranks.setdefault(copy.attempt, set())
        seen |= copy.ranks
        if copy.is_committed or copy.is_announced or len(seen) == copy.world_size:
            existing.add(copy.attempt)
    torn = claimed if claimed is not None and world.remote == () else ()
    for node in world.local:
        existing |= {copy.attempt for copy in node if copy.lineage not in torn}
    return existing


def _copies(records: Sequence[StepRecord]) -> tuple[Copy, ...]:
    copies = [(record, copy_of(record)) for record in records]
    for record, copy in copies:
        if copy is None or record.problems:
            why = "; ".join(record.problems) or "no rank has sealed it"
            told = {"step": record.attempt.step, "nonce": record.attempt.nonce, "why": why}
            _LOG.warning("step is not complete here: %s", why, extra=told)
    return tuple(copy for _, copy in copies if copy is not None)


def _look_near(run: Folder, run_id: str) -> View:
    records = scan_steps(run, run_id, is_local=True)
    return View(
        local=_copies(records),
        claims=tuple(scan_claims(run, run_id, is_local=True)),
        trained=scan_trained(run, run_id, is_local=True),
        damaged=_damaged(run, records, is_local=True),
    )


def _look_far(run: Folder, run_id: str) -> View:
    """The remote tier's view; attempts that only lack their commit are committed first.

    Raises:
        OSError: a step's folder cannot be opened: it may hold what is to be restored.
    """
    records = [_commit_if_ready(run, record, run_id) for record in scan_steps(run, run_id)]
    for record in records:
        if record.problems and copy_of(record) is None:
            _check_opens(run, record)
    return View(
        remote=_copies(records),
        remote_claims=tuple(scan_claims(run, run_id)),
        trained=scan_trained(run, run_id),
        damaged=_damaged(run, records),
    )


def _check_opens(run: Folder, record: StepRecord) -> None:
    try:
        open_step(run, record.folder).close()
    except OSError as error:
        if error.errno not in NO_FOLDER:
            raise


def _damaged(
    run: Folder, records: Sequence[StepRecord], *, is_local: bool = False
) -> dict[Attempt, str]:
    found = {
        record.attempt: record.problems[0]
        for record in records
        if record.problems
        and copy_of(record) is None
        and not record.folder.startswith(f"{TRASH}/")  # half emptied: a newer commit was there
    }
    try:
        with run.child(QUARANTINE) as folder:
            attempts = {parse_quarantined_file(name) for name in folder.names()}
    except OSError as error:
        if error.errno not in NO_FOLDER and not is_local:
            raise
        return found
    told = "a damaged file of it lies in quarantine"
    return {attempt: told for attempt in attempts if attempt is not None} | found


def _commit_if_ready(run: Folder, record: StepRecord, run_id: str) -> StepRecord:
    is_ready = record.committed is None and record.seals and record.is_sealed_by_all
    if not is_ready or record.folder.startswith(f"{TRASH}/"):
        return record
    try:
        with open_step(run, record.folder) as step:
            commit_step(step, record.attempt, run_id, datetime.now(UTC))
            return scan_step(step, record.attempt, record.folder, run_id)
    except (OSError, Corrupt) as error:
        _LOG.warning("not committed", extra={"step": record.attempt.step, "error": str(error)})
        return record


def _commit(run: Folder, attempt: Attempt, run_id: str) -> bool:
    with run.child(step_folder(attempt)) as step:
        return commit_step(step, attempt, run_id, datetime.now(UTC)) is not None


def _confirm(run: Folder, attempt: Attempt, run_id: str) -> bool:
    try:
        step = run.child(step_folder(attempt))
    except FileNotFoundError:
        return False
    with step:
        return confirm_commit(step, attempt, run_id) is not None
