"""What may be deleted on either tier. Pure; `loop` and `tasks` carry it out.

Only verified commits count, ordered by (lineage, step). The newest commit, the newest sealed step,
what training goes on from and whatever nothing supersedes are never named, nor what is pinned on
the remote tier. Nothing is named while a lost claim may have held it. The remote tier is tidied by
the lead alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from tidegate_contract.layout import LINEAGES, Attempt, lineage_file
from tidegate_contract.wire import Phase, TrainerState
from tidegate_sidecar.view import Key, RemoteView, StepView

TRASH_GRACE_SECONDS = 3600.0
"""Longer than a restore, so that no reader loses the folder that it reads from."""
_SILENT = timedelta(minutes=5)
"""A neighbour's document so much older than others is that of a pod that is gone."""
_RESTORING = frozenset({Phase.STARTING, Phase.RESTORING})


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlan:
    """What is moved and emptied on the remote tier.

    Attributes:
        confirm: the commit that makes the rest needless: made durable and read again before
            anything is done; without it nothing is.
        trash: steps outside `.trash` that are moved into it.
        restore: steps in `.trash` that are moved back: a commit newer than every commit outside,
            pinned ones, and what training goes on from.
        empty: steps in `.trash` whose files are removed.
        gives_back: what a crash left hidden in `.trash` goes back there first, to be judged anew.
        is_gradual: it ends with the first step of `empty` that anything was removed from.
    """

    confirm: Attempt | None
    trash: tuple[Attempt, ...] = ()
    restore: tuple[Attempt, ...] = ()
    empty: tuple[Attempt, ...] = ()
    gives_back: bool = False
    is_gradual: bool = False

    @property
    def is_needed(self) -> bool:
        """Anything is to be done."""
        return bool(self.trash or self.restore or self.empty or self.gives_back)


def is_restoring(states: Mapping[int, TrainerState], pod_uid: str) -> bool:
    """Whether a trainer may be reading steps now.

    Args:
        states: the documents of all trainers on this node.
        pod_uid: of this sidecar's pod: until its own trainer wrote a word it counts as restoring.
    """
    own = [state for state in states.values() if state.pod_uid == pod_uid]
    newest = max((state.written_at for state in states.values()), default=None)
    return not own or any(
        state.phase in _RESTORING
        for state in states.values()
        if state.pod_uid == pod_uid or (newest and newest - state.written_at < _SILENT)
    )


def decide_remote_retention(remote: RemoteView, keep: int) -> RemotePlan:
    """What the lead tidies on the remote tier.

    Args:
        remote: as it was just seen.
        keep: newest commits that stay; at least one always does.
    """
    outside = [step for step in remote.steps if not step.is_in_trash]
    trashed = [step for step in remote.steps if step.is_in_trash]
    wanted = remote.pins | {remote.base}
    held = {step.attempt for step in trashed if step.attempt in wanted} | _newest_trashed(remote)
    taken = {step.attempt for step in outside}
    plan = RemotePlan(
        confirm=remote.newest.attempt if remote.newest else None,
        restore=tuple(s.attempt for s in trashed if s.attempt in held and s.attempt not in taken),
        gives_back=bool(remote.hidden),
    )
    if plan.confirm is None:
        return plan
    if remote.lost is not None:
        return replace(plan, empty=remote.half_emptied)
    commits = _newest_first(remote, (step for step in outside if step.commit))
    kept = {step.attempt for step in commits[: max(1, keep)]} | {plan.confirm} | wanted
    kept |= {step.attempt for step in trashed}  # a slow flusher made such a folder again
    superseded = (s for s in outside if _is_newer(remote.newest_key, remote.key(s)))
    ages = remote.trash_age_seconds
    over = (s.attempt for s in trashed if ages.get(s.attempt, 0.0) >= TRASH_GRACE_SECONDS)
    return replace(
        plan,
        trash=tuple(step.attempt for step in superseded if step.attempt not in kept),
        empty=(*remote.half_emptied, *(attempt for attempt in over if attempt not in held)),
    )


def explain_wait(remote: RemoteView | None) -> str:
    """Why nothing old is removed although it could be; empty where nothing waits."""
    lost = remote.lost if remote else None
    if lost is None:
        return remote.held if remote else ""
    return (
        f"{LINEAGES}/{lineage_file(lost.number)} is damaged and may name any step: old ones stay"
        f" until a step of lineage {lost.number} or a newer one is durable"
    )


def _newest_trashed(remote: RemoteView) -> set[Attempt]:
    """The newest commit in `.trash`, if it is newer than every commit outside."""
    commits = _newest_first(remote, (s for s in remote.steps if s.is_in_trash and s.commit))
    newest = remote.newest_key
    return {
        step.attempt
        for step in commits[:1]
        if newest is None or _is_newer(remote.key(step), newest)
    }


def decide_local_retention(
    local: Iterable[StepView], remote: RemoteView | None, *, keep: int, lineage: int
) -> tuple[Attempt, ...]:
    """Which local copies go, oldest first; not to be asked while a trainer `is_restoring`.

    Args:
        local: all step folders of the run on this node.
        remote: as it was last seen; None while it could not be read, then nothing goes.
        keep: newest sealed steps that stay; at least one always does.
        lineage: that the trainers here are in.
    """
    if remote is None:
        return ()
    steps = list(local)
    sealed = _newest_first(remote, (step for step in steps if step.sealed))
    durable = [step for step in sealed if _is_durable(step, remote)]
    kept = {step.attempt for step in [*sealed[: max(1, keep)], *durable[:1]]} | {remote.base}
    newest = remote.newest_key if remote.lost is None else None
    superseded = [
        step.attempt
        for step in steps
        if step.attempt not in kept
        and (remote.key(step) == newest or _is_newer(newest, remote.key(step)))
        and newest is not None
    ]
    return tuple(sorted([*superseded, *_abandoned(steps, sealed, lineage)]))


def _abandoned(steps: Iterable[StepView], sealed: list[StepView], lineage: int) -> list[Attempt]:
    """Folders of saves that died before any rank sealed.

    Saves of one lineage are written in the order of their steps, so once this lineage sealed a
    later step nobody writes the earlier folder any more.
    """
    if not sealed or sealed[0].lineage != lineage:
        return []
    newest = max(step.attempt.step for step in sealed if step.lineage == lineage)
    return [
        step.attempt
        for step in steps
        if step.lineage is None and not step.problems and step.attempt.step < newest
    ]


def _is_durable(step: StepView, remote: RemoteView) -> bool:
    far = remote.find(step.attempt)
    return far is not None and far.commit is not None


def _newest_first(remote: RemoteView, steps: Iterable[StepView]) -> list[StepView]:
    keyed = [(key, step) for step in steps if (key := remote.key(step)) is not None]
    return [step for _, step in sorted(keyed, key=lambda pair: pair[0], reverse=True)]


def _is_newer(one: Key | None, other: Key | None) -> bool:
    """False when either is not known: what cannot be ordered is left alone."""
    return one is not None and other is not None and one > other
