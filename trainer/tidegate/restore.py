"""How a trainer starts: all ranks see both tiers, choose one step, verify, load, and vote.

Observing is I/O on rank 0 (remote) and each node's first rank (local); the choice is the contract's
pure `restore_point`, on identical inputs on every rank; a failed vote takes the next candidate
together. Collective; main thread; called by `Checkpointer.restore` only.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from tidegate.named import agree_step, explain_missing, explain_named
from tidegate.observe import (
    build_world,
    claim_next,
    find_existing_attempts,
    mirror_claim,
    observe_tiers,
    poll_commit,
)
from tidegate.ranks import Ranks
from tidegate.reading import Load, OpenedCopy, open_copy
from tidegate.site import Site
from tidegate.state import TrainingState
from tidegate.verdict import Judge, open_source
from tidegate_contract.errors import Reject, Retry
from tidegate_contract.folder import open_step
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import RUN_DOCUMENT, Attempt
from tidegate_contract.restore_point import (
    Candidate,
    RestorePoint,
    Source,
    World,
    decide_restore_point,
    explain_doubt,
)

_LOG = logging.getLogger(__name__)
_MAX_ROUNDS = 32
"""Looks at both tiers in one restore; more means that something else is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What training goes on from.

    Attributes:
        step, tokens: agreed counts of the restored step.
        tier: `Local`, `Remote`, or `Mixed` when ranks read from different tiers.
        lineage: claimed by this restore.
        reason: a sentence: why this step and no newer one.
    """

    step: int
    tokens: int
    tier: str
    lineage: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a restore on one rank.

    Attributes:
        claim: of the lineage, also for a fresh start.
        reason: a sentence.
        candidate: what was loaded; None for a fresh start.
        is_remote_claim: the lineage was claimed on the remote tier.
        sealed_at: of the loaded step, UTC.
        bytes_local, bytes_remote: read by this rank.
    """

    claim: LineageClaim
    reason: str
    candidate: Candidate | None = None
    is_remote_claim: bool = False
    sealed_at: datetime | None = None
    bytes_local: int = 0
    bytes_remote: int = 0

    @property
    def lineage(self) -> int:
        """Its number."""
        return self.claim.number

    @property
    def tier(self) -> str | None:
        """`Local`, `Remote`, `Mixed`; None for a fresh start."""
        if self.candidate is None:
            return None
        sources = set(self.candidate.sources)
        return str(sources.pop()) if len(sources) == 1 else "Mixed"


@dataclass(slots=True, kw_only=True)
class _Loaded:
    copy: OpenedCopy | None = None
    load: Load | None = None
    target: dict[str, Any] = field(default_factory=dict)


class Restore:
    """One restore of one rank."""

    def __init__(
        self, site: Site, ranks: Ranks, state: TrainingState, step: int | None = None
    ) -> None:
        """Nothing is read yet; `step` is the one that a person wants and no other."""
        self._site = site
        self._step = step
        self._ranks = ranks
        self._state = state
        self._policy = site.settings.policy
        self._world: World = World(nodes=site.topology.nodes, local=(), remote=())
        self._excluded: dict[Attempt, str] = {}
        self._unreadable: dict[tuple[Attempt, tuple[str, ...]], str] = {}
        self._failed_local: dict[tuple[int, Attempt], str] = {}
        self._claims: dict[int, LineageClaim] = {}
        self._remote_numbers: frozenset[int] | None = None
        self._damaged: dict[Attempt, str] = {}
        self._damage: dict[Attempt, str] = {}
        self._doubted: dict[Attempt, str] = {}
        self._judge = Judge(site)
        self._is_written = False

    def run(self) -> Outcome:
        """Restores the newest step that all ranks can read, or starts fresh where there is none.

        Raises:
            Reject: checkpoints exist and none can be restored, or rank state has no rule; or the
                named step cannot be restored, or not all ranks name the same.
            Retry: the remote tier cannot be read, and it must or no node holds a step.
        """
        agree_step(self._ranks, self._step)
        point = self._wait_for_pending(self._observe())
        for _ in range(_MAX_ROUNDS):
            candidate = next((c for c in point.candidates if not self._has_failed(c)), None)
            self._check_doubted(point, candidate)
            if candidate is None:
                return self._start_fresh(point)
            outcome = self._try(candidate, self._explain(point, candidate))
            if outcome is not None:
                return outcome
            point = self._observe()
        told = next(reversed(self._failures.values()), "see the log")
        raise Reject(
            f"run {self._site.identity.name}: {_MAX_ROUNDS} tries to restore have failed ({told})"
        )

    @property
    def _is_lead(self) -> bool:
        return self._site.rank == 0

    @property
    def _failures(self) -> dict[Attempt, str]:
        return {attempt: why for (attempt, _), why in self._unreadable.items()} | self._excluded

    def _reasons(self, point: RestorePoint) -> dict[Attempt, str]:
        return {**self._damaged, **dict(point.refused), **self._damage, **self._failures}

    def _check_doubted(self, point: RestorePoint, candidate: Candidate | None) -> None:
        """Passes no step over because of its owner where `run.json` names him: a person decides."""
        end = len(point.order) if candidate is None else point.order.index(candidate.attempt)
        found = next((a for a in point.order[:end] if a in self._doubted), None)
        if found is not None:
            raise Reject(
                f"run {self._site.identity.name}: step {found.step} is not restored: "
                f"{self._doubted[found]}; {RUN_DOCUMENT} names that user, but others than this "
                "process's user, root and the sidecar's can have written it: if it is a stranger's "
                "run, move its folder aside"
            )

    def _has_failed(self, candidate: Candidate) -> bool:
        """A step that lies elsewhere now was moved while it was opened, and is tried again."""
        attempt = candidate.attempt
        return attempt in self._excluded or (attempt, candidate.folders) in self._unreadable

    def _observe(self) -> RestorePoint:
        views = self._ranks.attempt(lambda: observe_tiers(self._site))
        self._damaged = {a: why for view in views for a, why in view.damaged.items()}
        if self._site.settings.remote is not None:
            self._remote_numbers = frozenset(claim.number for claim in views[0].remote_claims)
        self._world = replace(
            build_world(self._site, views),
            step=self._step,
            running=frozenset(self._claims),
            failed_local=dict(self._failed_local),
        )
        return decide_restore_point(self._world)

    def _wait_for_pending(self, point: RestorePoint) -> RestorePoint:
        """All ranks sealed a newer step and its flush is under way: worth a wait."""
        if point.pending is None:
            return point
        pending = point.pending
        self._ranks.attempt(lambda: poll_commit(self._site, pending) if self._is_lead else None)
        return self._observe()

    def _try(self, candidate: Candidate, reason: str) -> Outcome | None:
        is_same_world = candidate.world_size == self._ranks.world_size
        self._check_rank_state(candidate)
        loaded = _Loaded()
        try:
            if not self._vote(candidate, lambda: self._open(candidate, loaded)):
                return None
            if self._step is None:
                self._claim(candidate.attempt)  # before the work: a try that dies in it counts
            if not self._vote(candidate, lambda: self._verify(loaded, is_same_world)):
                return None
            self._is_written = True
            if not self._vote(candidate, lambda: self._load(loaded, candidate), is_whole=True):
                return None
            # A named step is the newest from its claim on: only one that was loaded becomes that.
            claim = self._claim(candidate.attempt)
        finally:
            if loaded.copy is not None:
                loaded.copy.folder.close()
        assert loaded.copy is not None and loaded.load is not None
        size, is_local = loaded.load.size_bytes, loaded.copy.source is Source.LOCAL
        return Outcome(
            claim=claim,
            reason=reason,
            candidate=candidate,
            is_remote_claim=self._world.remote is not None,
            sealed_at=loaded.copy.sealed_at,
            bytes_local=size if is_local else 0,
            bytes_remote=0 if is_local else size,
        )

    def _check_rank_state(self, candidate: Candidate) -> None:
        size = self._ranks.world_size
        rule = self._site.settings.options.on_world_change
        if candidate.world_size == size or rule is not None or not self._state.has_rank_state:
            return
        raise Reject(
            f"step {candidate.attempt.step} was saved by {candidate.world_size} ranks, now there "
            f"are {size}: rank_state (random number generators are part of it) needs a rule; pass "
            "Options(on_world_change=…), or Options(keeps_rng=False) and no rank_state"
        )

    def _vote(
        self, candidate: Candidate, action: Callable[[], object], *, is_whole: bool = False
    ) -> bool:
        """Runs `action` on all ranks; False, on all ranks alike, if it failed on any.

        Args:
            candidate: what is tried.
            action: this rank's part.
            is_whole: all files were verified, so a failure says something about the whole attempt,
                unless a file changed since; otherwise the nodes' own copies are left out first, as
                the remote one may do.
        """
        verdicts = self._ranks.gather(self._judge.judge(candidate, action))
        failed = [(rank, v) for rank, v in enumerate(verdicts) if v.sentence]
        if not failed:
            return True
        sentence = "; ".join(f"rank {rank}: {verdict.sentence}" for rank, verdict in failed[:3])
        is_damage = any(verdict.is_damage for _, verdict in failed)
        if is_damage:
            self._damage[candidate.attempt] = sentence
        if any(verdict.is_doubted for _, verdict in failed):
            self._doubted[candidate.attempt] = sentence
        if not any(verdict.is_away for _, verdict in failed):
            near = [(r, v) for r, v in failed if candidate.sources[r] is Source.LOCAL]
            if is_whole and not is_damage:
                self._excluded[candidate.attempt] = sentence
            elif not near:
                self._unreadable[candidate.attempt, candidate.folders] = sentence
            for rank, verdict in near:
                node = self._site.topology.node_of(rank)
                self._failed_local[node, candidate.attempt] = f"rank {rank}: {verdict.sentence}"
        _LOG.warning(
            "step cannot be restored: %s",
            sentence,
            extra={"step": candidate.attempt.step, "why": sentence},
        )
        return False

    def _open(self, candidate: Candidate, loaded: _Loaded) -> None:
        source = candidate.sources[self._site.rank]
        with open_source(self._site, source) as run:
            folder = open_step(run, candidate.folders[self._site.rank])
        try:
            loaded.copy = open_copy(
                folder,
                candidate.attempt,
                self._site.identity.run_id,
                source,
                self._site.trusted_uids,
            )
        except BaseException:
            folder.close()
            raise

    def _verify(self, loaded: _Loaded, is_same_world: bool) -> None:
        assert loaded.copy is not None
        loaded.target = self._state.build_target(loaded.copy.metadata, is_same_world=is_same_world)
        loaded.load = Load(loaded.copy, loaded.target, self._site.trusted_uids)
        loaded.load.verify()

    def _load(self, loaded: _Loaded, candidate: Candidate) -> None:
        assert loaded.load is not None
        loaded.load.read()
        self._state.apply(
            loaded.target,
            saved_world=candidate.world_size,
            world_size=self._ranks.world_size,
        )

    def _claim(self, attempt: Attempt | None) -> LineageClaim:
        """Rank 0 opens the lineage; all ranks learn its claim, and each node keeps a mirror.

        A second look at the same attempt goes on in the lineage that it opened: a restore that
        meets several damaged files is one try.
        """
        newest = self._claims.get(max(self._claims, default=0))
        if newest is not None and newest.restored == attempt:
            return newest
        claim = self._ranks.attempt(
            lambda: claim_next(self._site, self._world, attempt) if self._is_lead else None
        )[0]
        assert claim is not None, "rank 0 gives a claim or raises"
        if self._site.is_first_of_node:
            mirror_claim(self._site, claim)
        if attempt is not None:
            self._claims[claim.number] = claim
        return claim

    def _explain(self, point: RestorePoint, candidate: Candidate) -> str:
        step = candidate.attempt.step
        reasons = self._reasons(point)
        before = point.order[: point.order.index(candidate.attempt)]
        unknown = [a for a in self._damaged if a not in point.order]
        if self._step is not None:
            same = [*(a for a in unknown if a.step == step), *before]
            return explain_named([reasons[a] for a in same if a in reasons], step)
        passed = [*(a for a in unknown if a.step > step), *before]
        newer = [f"step {a.step}: {reasons[a]}" for a in passed if a in reasons]
        told = [f"step {step} is the newest step"]
        if newer:
            told = [f"step {step} is the newest that all ranks can read ({'; '.join(newer)})"]
        doubt = explain_doubt(self._world.claims, candidate)
        return "; ".join([*told, doubt] if doubt else told)

    def _start_fresh(self, point: RestorePoint) -> Outcome:
        """Nothing to restore: right at the first start, an error when steps were there.

        It is an error, too, when a step was named: neither nothing nor another step replaces it.
        """
        run = self._site.identity.name
        has_remote = self._site.settings.remote is not None
        if has_remote and self._world.remote is None:
            raise Retry(
                f"run {run}: the remote tier cannot be read and no node holds "
                "a step that can be restored; nothing is begun anew meanwhile"
            )
        if self._step is not None:
            raise Reject(f"run {run}: {explain_missing(self._world, self._reasons(point))}")
        existing = find_existing_attempts(self._world, claimed=self._remote_numbers)
        existing |= set(self._damaged)
        reasons = self._reasons(point)
        told = "; ".join(f"step {a.step}: {why}" for a, why in list(reasons.items())[:3])
        if point.set_aside:
            raise Reject(
                f"run {run}: no step can be restored but such as failed too often ({told}); to try "
                "them again raise recovery.maxAttemptsPerStep of the policy, outside a cluster "
                f"max_restore_tries (now {self._policy.max_restore_tries})"
            )
        may_ignore = self._policy.start_fresh_when_unrestorable and not self._is_written
        if existing and not may_ignore:
            raise Reject(
                f"run {run}: {len(existing)} checkpoints exist and none can be restored ({told}); "
                "to start from nothing set recovery.onUnrestorable: StartFresh"
            )
        reason = f"no step could be restored ({told})" if told else "no step was ever saved"
        return Outcome(claim=self._claim(None), reason=reason)
